"""A corpus as token ids on disk: tokenized once, memory-mapped ever after.

Owns the stored form and its key, a hash of everything the ids depend on: the texts, the tokenizer
and the settings. It knows nothing of sequence lengths, batches or order, which are cheap and come
later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from herder.config.run import DataConfig
from herder.data.cache import build_once, cache_folder
from herder.data.progress import progress
from herder.data.sources import Source, documents, fingerprint, is_held_out, open_source
from herder.data.tokenizer import Tokenizer
from herder.errors import DataError

_FORMAT = 1
"""To be raised when the same settings come to mean other ids."""
_DOCUMENTS_AT_ONCE = 1024
SPLITS = ("train", "validation")


@dataclass(frozen=True, eq=False)
class DocumentTokens:
    """Documents end to end: document d is tokens[offsets[d] : offsets[d + 1]]."""

    tokens: NDArray[np.integer]
    """uint16 where the vocabulary allows, else uint32; memory-mapped."""
    offsets: NDArray[np.int64]
    num_text_bytes: int
    """UTF-8 bytes of the texts."""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])


@dataclass(frozen=True, eq=False)
class TokenizedCorpus:
    """Both splits of a corpus."""

    name: str
    fingerprint: str
    """Equal for equal ids in equal order: a resumed run checks it."""
    folder: Path
    train: DocumentTokens
    validation: DocumentTokens


def prepare_corpus(config: DataConfig, tokenizer: Tokenizer) -> TokenizedCorpus:
    """The corpus that `config` names as ids of `tokenizer`, from the cache or tokenized now.

    Every document is encoded as `Tokenizer.encode_documents` says. Safe for concurrent processes:
    one tokenizes, the others wait. Raises DataError for a source that cannot be read or has no
    document to train on.
    """
    source = open_source(config.source, text_key=config.text_key)
    settings = [config.validation_fraction, config.max_documents]
    parts = [_FORMAT, fingerprint(source), tokenizer.fingerprint, settings]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    folder = build_once(
        cache_folder() / "tokens" / key[:32],
        lambda fresh: _tokenize(source, config, tokenizer, fresh),
        is_whole=lambda folder: (folder / "corpus.json").is_file(),
    )
    return _open(config.source, key, folder)


class _SplitWriter:
    """Appends documents of one split to its file."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._file = file
        self._dtype = dtype
        self.lengths: list[int] = []
        self.num_text_bytes = 0

    def add(self, texts: Sequence[str], encoded: Sequence[Sequence[int]]) -> None:
        self.lengths.extend(map(len, encoded))
        self.num_text_bytes += sum(len(text.encode()) for text in texts)
        self._file.write(np.fromiter(chain.from_iterable(encoded), self._dtype).tobytes())


def _tokenize(source: Source, config: DataConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Write both splits to `folder`; corpus.json comes last and says that all is there."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    num_source_bytes = sum(path.stat().st_size for path in source.files)
    texts = documents(source, max_documents=config.max_documents)
    with (
        (folder / "train.tokens").open("wb") as train,
        (folder / "validation.tokens").open("wb") as validation,
        progress(f"tokenizing {source.name}", num_source_bytes, bytes_counted=True) as show,
    ):
        writers = (_SplitWriter(train, dtype), _SplitWriter(validation, dtype))
        for batch in _batches(texts):
            encoded = tokenizer.encode_documents(batch)
            held_out = [is_held_out(text, fraction=config.validation_fraction) for text in batch]
            for side, writer in enumerate(writers):
                chosen = [index for index, is_out in enumerate(held_out) if is_out == bool(side)]
                writer.add([batch[i] for i in chosen], [encoded[i] for i in chosen])
            show(sum(writer.num_text_bytes for writer in writers))
        show(num_source_bytes)
    if not any(length > 1 for length in writers[0].lengths):
        raise DataError(
            f"The corpus {source.name} has no document to train on: of "
            f"{sum(len(writer.lengths) for writer in writers)} documents, "
            f"{len(writers[1].lengths)} are held out (data.validation_fraction="
            f"{config.validation_fraction}) and the rest has fewer than two tokens."
        )
    for name, writer in zip(SPLITS, writers, strict=True):
        offsets = np.concatenate([[0], np.cumsum(writer.lengths, dtype=np.int64)])
        np.save(folder / f"{name}.offsets.npy", offsets.astype(np.int64))
    bytes_by_split = dict(zip(SPLITS, (writer.num_text_bytes for writer in writers), strict=True))
    content = {"dtype": dtype.name, "source": source.name, "num_text_bytes": bytes_by_split}
    (folder / "corpus.json").write_text(json.dumps(content, indent=2) + "\n")


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(texts, _DOCUMENTS_AT_ONCE)):
        yield batch


def _open(name: str, key: str, folder: Path) -> TokenizedCorpus:
    content = json.loads((folder / "corpus.json").read_text())
    splits = [
        _open_split(folder, split, np.dtype(content["dtype"]), content["num_text_bytes"][split])
        for split in SPLITS
    ]
    return TokenizedCorpus(name, key, folder, *splits)


def _open_split(
    folder: Path, split: str, dtype: np.dtype[np.integer], num_text_bytes: int
) -> DocumentTokens:
    offsets = np.load(folder / f"{split}.offsets.npy")
    path = folder / f"{split}.tokens"
    expected_bytes = int(offsets[-1]) * dtype.itemsize
    if path.stat().st_size != expected_bytes:
        raise DataError(
            f"{path} has {path.stat().st_size} bytes, its index says {expected_bytes}: it is "
            f"damaged. Delete {folder} and it is made again."
        )
    # An empty file cannot be mapped.
    tokens = np.memmap(path, dtype, mode="r") if expected_bytes else np.empty(0, dtype)
    return DocumentTokens(tokens=tokens, offsets=offsets, num_text_bytes=num_text_bytes)
