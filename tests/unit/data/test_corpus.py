"""A corpus on disk: the right ids, tokenized once, keyed by all they depend on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from herder.config.run import DataConfig
from herder.data.corpus import DocumentTokens, prepare_corpus
from herder.data.sources import is_held_out
from herder.data.tokenizer import Tokenizer
from herder.errors import DataError

TEXTS = [f"The fox number {index} 今天" for index in range(300)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tokenizer(small_tokenizer_json: str) -> Tokenizer:
    return Tokenizer(small_tokenizer_json, settings={"eos_token": "</s>"})


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return DataConfig(source=str(path), validation_fraction=0.1)


def texts_of(split: DocumentTokens, tokenizer: Tokenizer) -> list[str]:
    parts = np.split(split.tokens, split.offsets[1:-1])
    return [tokenizer.decode(part.tolist()) for part in parts]


def test_both_splits_hold_their_documents_in_order(
    config: DataConfig, tokenizer: Tokenizer
) -> None:
    corpus = prepare_corpus(config, tokenizer)
    held_out = [text for text in TEXTS if is_held_out(text, fraction=0.1)]
    assert texts_of(corpus.validation, tokenizer) == held_out
    assert texts_of(corpus.train, tokenizer) == [text for text in TEXTS if text not in held_out]
    assert corpus.validation.num_text_bytes == sum(len(text.encode()) for text in held_out)
    ends = corpus.train.tokens[corpus.train.offsets[1:] - 1]
    assert set(ends.tolist()) == {tokenizer.eos_token_id}


def test_the_second_time_nothing_is_tokenized(config: DataConfig, tokenizer: Tokenizer) -> None:
    first = prepare_corpus(config, tokenizer)
    stamp = (first.folder / "train.tokens").stat().st_mtime_ns
    second = prepare_corpus(config, tokenizer)
    assert second.fingerprint == first.fingerprint
    assert (second.folder / "train.tokens").stat().st_mtime_ns == stamp
    assert isinstance(second.train.tokens, np.memmap)


def test_texts_settings_and_tokenizer_all_make_another_corpus(
    config: DataConfig, tokenizer: Tokenizer, small_tokenizer_json: str
) -> None:
    prints = {prepare_corpus(config, tokenizer).fingerprint}
    prints.add(prepare_corpus(config, Tokenizer(small_tokenizer_json)).fingerprint)
    fewer = config.model_copy(update={"max_documents": 50})
    prints.add(prepare_corpus(fewer, tokenizer).fingerprint)
    Path(config.source).write_text('"another text"\n"and one more"\n')
    prints.add(prepare_corpus(config, tokenizer).fingerprint)
    assert len(prints) == 4


def test_a_corpus_that_is_all_held_out_is_refused(
    config: DataConfig, tokenizer: Tokenizer, cache: Path
) -> None:
    everything = config.model_copy(update={"validation_fraction": 1 - 1e-12})
    with pytest.raises(DataError, match="no document to train on: of 300 documents, 300 are held"):
        prepare_corpus(everything, tokenizer)
    assert list(cache.rglob("*.tokens")) == []


def test_an_empty_corpus_leaves_nothing(
    config: DataConfig, tokenizer: Tokenizer, cache: Path
) -> None:
    Path(config.source).write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        prepare_corpus(config, tokenizer)
    assert list(cache.rglob("*.tokens")) == []


@pytest.mark.parametrize("name", ["train.tokens", "validation.npz"])
@pytest.mark.parametrize("length", [0, 100])
def test_a_truncated_token_file_is_refused(
    config: DataConfig, tokenizer: Tokenizer, name: str, length: int
) -> None:
    path = prepare_corpus(config, tokenizer).folder / name
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=r"is damaged: .*Delete it and it is made again"):
        prepare_corpus(config, tokenizer)


def test_a_missing_token_file_is_told(config: DataConfig, tokenizer: Tokenizer) -> None:
    (prepare_corpus(config, tokenizer).folder / "train.npz").unlink()
    with pytest.raises(DataError, match=r"is damaged: .*No such file"):
        prepare_corpus(config, tokenizer)
