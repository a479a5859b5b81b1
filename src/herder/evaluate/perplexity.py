"""How well a model predicts text: perplexity and bits per byte of whole documents.

What counts. Every token of a document is predicted once, from those before it in the same document.
The first token counts only where the tokenizer writes a beginning of text before it; otherwise
nothing precedes it, and neither it nor its bytes count. The end-of-text token is not text and does
not count. A document longer than the window is cut, and each piece is predicted from its own start.

Tokens weigh equally, so long documents weigh more. Bits per byte divides the same total by the
UTF-8 bytes of the text, which makes models with different tokenizers comparable. The standard error
treats documents, not tokens, as the sample, since tokens of one document are alike.

Knows a decoder and a tokenizer; not where they come from or how results are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from herder.data.packing import PackedRows
from herder.data.tokenizer import Tokenizer
from herder.errors import DataError, ModelError
from herder.model.attend import PackedAttend
from herder.model.decoder import Decoder
from herder.model.readout import LogProbReadout

_DOCUMENTS_AT_ONCE = 256
_MICRO_BATCH_TOKENS = 2048
"""Tokens of one forward, where the documents are not longer."""
_LARGEST_LOSS = 700.0
"""Nats a token; e to more than this is no number, and no model that works comes near."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One total of nats, told in three ways."""

    loss: float
    """Mean over tokens, in nats."""
    perplexity: float
    """e to the loss: as uncertain as a choice between so many equally likely tokens."""
    bits_per_byte: float


@dataclass(frozen=True, kw_only=True)
class PerplexityResult:
    """A model's score on documents, with the scores of models that know next to nothing."""

    model: Score
    loss_standard_error: float | None
    """Over documents; None where there is only one."""
    perplexity_standard_error: float | None
    """By the delta method: perplexity times the loss' standard error."""
    num_tokens: int
    num_bytes: int
    num_documents: int
    unigram: Score
    """Each token's frequency in these very documents: no context-free model is better on them."""
    uniform: Score
    """Every token of the vocabulary alike."""


@dataclass(frozen=True, eq=False)
class EncodedDocuments:
    """Documents to score, end to end: document d is tokens[offsets[d] : offsets[d + 1]]."""

    tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    num_bytes: int
    """UTF-8 bytes of what is predicted."""

    @property
    def num_predictions(self) -> int:
        return len(self.tokens) - (len(self.offsets) - 1)


def encode_for_scoring(
    tokenizer: Tokenizer, texts: Iterable[str], *, max_tokens: int
) -> EncodedDocuments:
    """Texts in order, until a document reaches `max_tokens` predictions; that one is the last.

    Raises DataError where no text has anything to predict.
    """
    kept: list[list[int]] = []
    num_bytes, num_predictions = 0, 0
    for text, ids in _encoded(tokenizer, texts):
        if len(ids) < 2:
            continue
        kept.append(ids)
        num_bytes += len(text.encode()) - tokenizer.num_bytes(ids[0])
        num_predictions += len(ids) - 1
        if num_predictions >= max_tokens:
            break
    if not kept:
        raise DataError("There is nothing to score: no document has two tokens or more.")
    offsets = np.cumsum([0, *map(len, kept)])
    return EncodedDocuments(np.concatenate(kept), offsets, num_bytes)


def evaluate_perplexity(
    decoder: Decoder,
    documents: EncodedDocuments,
    *,
    window_tokens: int,
    device: torch.device,
    on_progress: Callable[[int], None] = lambda _: None,
) -> PerplexityResult:
    """Score `documents`, cut to pieces of `window_tokens`, in the decoder's own precision.

    Raises ModelError where a log-probability is not finite.
    """
    longest = int(np.diff(documents.offsets).max()) - 1
    row_length = min(window_tokens, max(longest, _MICRO_BATCH_TOKENS))
    packed = PackedRows(documents.tokens, documents.offsets, sequence_length=row_length)
    nats = np.zeros(len(documents.offsets) - 1)
    num_done = 0
    rows_at_once = max(1, _MICRO_BATCH_TOKENS // row_length)
    for start in range(0, packed.num_rows, rows_at_once):
        rows = np.arange(start, min(start + rows_at_once, packed.num_rows))
        num_done += _add_nats(decoder, packed, rows, nats, device=device)
        on_progress(num_done)
    return _result(documents, nats, vocab_size=decoder.config.vocab_size)


def _encoded(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Texts with the ids to predict: no end of text, and nothing in a text is a control token."""
    remaining = iter(texts)
    while batch := list(islice(remaining, _DOCUMENTS_AT_ONCE)):
        encoded = tokenizer.encode_batch(
            batch, add_special_tokens=True, control_tokens_are_text=True
        )
        for text, ids in zip(batch, encoded, strict=True):
            ends = ids[-1:] == [tokenizer.end_token_id]
            yield text, ids[:-1] if ends else ids


@torch.no_grad()
def _add_nats(
    decoder: Decoder,
    packed: PackedRows,
    rows: NDArray[np.int64],
    nats: NDArray[np.float64],
    *,
    device: torch.device,
) -> int:
    """Add what the pieces in `rows` cost to their documents' nats; returns their tokens."""
    batch = packed.micro_batch(rows, is_padded=False)
    moved = batch.to(device)
    logprob_T = decoder(
        moved.tokens_T,
        positions_T=moved.positions_T,
        attend=PackedAttend(batch.document_lengths, device=device.type),
        readout=LogProbReadout(moved.targets_T),
    )
    cost_T = -logprob_T.double().cpu().numpy()
    if not np.isfinite(cost_T).all():
        raise ModelError(
            f"The model gives {int((~np.isfinite(cost_T)).sum())} of {len(cost_T)} tokens a "
            "probability that is no number. Its weights are damaged, or need more precision: "
            "--precision fp32."
        )
    starts = np.cumsum([0, *batch.document_lengths[:-1]])
    pieces = np.concatenate([np.array(packed.row_pieces(row)) for row in rows.tolist()])
    np.add.at(nats, packed.pieces.documents[pieces], np.add.reduceat(cost_T, starts))
    return batch.num_tokens


def _result(
    documents: EncodedDocuments, nats: NDArray[np.float64], *, vocab_size: int
) -> PerplexityResult:
    num_tokens, num_bytes = documents.num_predictions, documents.num_bytes
    num_documents = len(nats)
    score = _score(float(nats.sum()), num_tokens, num_bytes)
    is_predicted = np.ones(len(documents.tokens), dtype=bool)
    is_predicted[documents.offsets[:-1]] = False
    counts = np.bincount(documents.tokens[is_predicted])
    counts = counts[counts > 0]
    standard_error = _ratio_standard_error(nats, np.diff(documents.offsets) - 1)
    return PerplexityResult(
        model=score,
        loss_standard_error=standard_error,
        perplexity_standard_error=standard_error and score.perplexity * standard_error,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        num_documents=num_documents,
        unigram=_score(-float((counts * np.log(counts / num_tokens)).sum()), num_tokens, num_bytes),
        uniform=_score(num_tokens * math.log(vocab_size), num_tokens, num_bytes),
    )


def _score(nats: float, num_tokens: int, num_bytes: int) -> Score:
    loss = nats / num_tokens
    if loss > _LARGEST_LOSS:
        raise ModelError(f"The model's loss is {loss:.0f} nats a token: its weights are damaged.")
    return Score(
        loss=loss, perplexity=math.exp(loss), bits_per_byte=nats / math.log(2) / max(num_bytes, 1)
    )


def _ratio_standard_error(nats: NDArray[np.float64], num_tokens: NDArray[np.int64]) -> float | None:
    """Standard error of sum(nats) / sum(num_tokens) over documents.

    Source: the linearized variance of a ratio, Cochran, Sampling Techniques, 1977, section 6.3.
    """
    num_documents = len(nats)
    if num_documents < 2:
        return None
    residuals = nats - nats.sum() / num_tokens.sum() * num_tokens
    variance = num_documents / (num_documents - 1) * float((residuals**2).sum())
    return math.sqrt(variance) / float(num_tokens.sum())
