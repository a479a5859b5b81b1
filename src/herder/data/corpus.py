"""A corpus as token ids on disk: tokenized once, memory-mapped ever after.

Owns the stored form and its key, a hash of everything the ids depend on: the texts, the tokenizer
and the settings. It knows nothing of sequence lengths, batches or order, which are cheap and come
later.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from herder.config.run import DataConfig
from herder.data.cache import build_once, cache_folder
from herder.data.progress import progress
from herder.data.sources import Source, documents, fingerprint, is_held_out, open_source
from herder.data.tokenizer import Tokenizer
from herder.errors import DataError

_FORMAT = 2
"""To be raised when the same settings come to mean other ids, or another form."""
_OF_THE_SAME_IDS = (1,)
"""Earlier formats that differ in form alone."""
_DOCUMENTS_AT_ONCE = 1024


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
    earlier_fingerprints: tuple[str, ...]
    """What older versions called the same ids."""
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
    parts = [fingerprint(source), tokenizer.fingerprint, settings]
    key, *earlier = (
        hashlib.sha256(json.dumps([form, *parts]).encode()).hexdigest()
        for form in (_FORMAT, *_OF_THE_SAME_IDS)
    )
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    folder = build_once(
        cache_folder() / "tokens" / key[:32],
        lambda fresh: _tokenize(source, config, tokenizer, dtype, fresh),
    )
    train, validation = (_open(folder, name, dtype) for name in ("train", "validation"))
    return TokenizedCorpus(config.source, key, tuple(earlier), folder, train, validation)


def _tokenize(
    source: Source,
    config: DataConfig,
    tokenizer: Tokenizer,
    dtype: np.dtype[np.unsignedinteger],
    folder: Path,
) -> None:
    """Write the tokens of both splits to `folder`, and where their documents begin."""
    names = ("train", "validation")
    lengths: dict[str, list[int]] = {name: [] for name in names}
    num_text_bytes = dict.fromkeys(names, 0)
    texts = documents(source, max_documents=config.max_documents)
    num_source_bytes = sum(path.stat().st_size for path in source.files)
    with (
        (folder / "train.tokens").open("wb") as train,
        (folder / "validation.tokens").open("wb") as validation,
        progress(f"tokenizing {source.name}", num_source_bytes) as show,
    ):
        while batch := list(islice(texts, _DOCUMENTS_AT_ONCE)):
            for text, ids in zip(batch, tokenizer.encode_documents(batch), strict=True):
                is_out = is_held_out(text, fraction=config.validation_fraction)
                (validation if is_out else train).write(np.array(ids, dtype).tobytes())
                lengths[names[is_out]].append(len(ids))
                num_text_bytes[names[is_out]] += len(text.encode())
            show(sum(num_text_bytes.values()))
    if max(lengths["train"], default=0) < 2:
        raise DataError(
            f"The corpus {source.name} has no document to train on: of "
            f"{sum(map(len, lengths.values()))} documents, {len(lengths['validation'])} are held "
            f"out (data.validation_fraction={config.validation_fraction}) and the rest has fewer "
            "than two tokens."
        )
    for name in names:
        offsets = np.cumsum([0, *lengths[name]], dtype=np.int64)
        np.savez(folder / f"{name}.npz", offsets=offsets, num_text_bytes=num_text_bytes[name])


def _open(folder: Path, name: str, dtype: np.dtype[np.unsignedinteger]) -> DocumentTokens:
    path = folder / f"{name}.tokens"
    try:
        with (folder / f"{name}.npz").open("rb") as file, np.load(file) as index:
            offsets, num_text_bytes = index["offsets"], int(index["num_text_bytes"])
        num_bytes, expected_bytes = path.stat().st_size, int(offsets[-1]) * dtype.itemsize
        if num_bytes != expected_bytes:
            raise ValueError(f"{path.name} has {num_bytes} bytes, its index says {expected_bytes}")
    except (OSError, ValueError, LookupError, EOFError, BadZipFile) as error:
        told = f"{folder} is damaged: {error}. Delete it and it is made again."
        raise DataError(told) from error
    # An empty file cannot be mapped.
    tokens = np.memmap(path, dtype, mode="r") if num_bytes else np.empty(0, dtype)
    return DocumentTokens(tokens, offsets, num_text_bytes)
