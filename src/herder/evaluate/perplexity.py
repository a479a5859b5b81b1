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
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from herder.data.batch import MicroBatch
from herder.data.corpus import DocumentTokens
from herder.data.packing import PackedRows
from herder.data.tokenizer import Tokenizer
from herder.errors import DataError, ModelError
from herder.model.attend import PackedAttend
from herder.model.decoder import Decoder
from herder.model.readout import LogProbReadout

_MICRO_BATCH_TOKENS = 2048
"""Tokens of one forward, where the documents are not longer."""
_LARGEST_LOSS = 700.0
"""Nats a token; e to more than this is no number, and no model that works comes near."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One total of nats, told in three ways."""

    perplexity: float
    """e to the loss: as uncertain as a choice between so many equally likely tokens."""
    bits_per_byte: float
    loss: float
    """Mean over tokens, in nats."""


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
    baselines: dict[str, Score]
    """unigram: each token's frequency in these very documents, which no context-free model beats on
    them. uniform: every token of the vocabulary alike."""


def encode_for_scoring(
    tokenizer: Tokenizer, texts: Iterable[str], *, max_tokens: int
) -> DocumentTokens:
    """Texts in order, until a document reaches `max_tokens` predictions; that one is the last.

    The bytes are those of what is predicted. Raises DataError where there is nothing to predict.
    """
    kept: list[list[int]] = []
    num_bytes, num_predictions = 0, 0
    for text in texts:
        (ids,) = tokenizer.encode_documents([text])
        if tokenizer.end_token_id is not None:
            ids.pop()
        if len(ids) < 2:
            continue
        kept.append(ids)
        num_bytes += len(text.encode()) - tokenizer.num_bytes(ids[0])
        num_predictions += len(ids) - 1
        if num_predictions >= max_tokens:
            break
    if not kept:
        raise DataError(
            "There is nothing to score: no document is held out, or none has two tokens. "
            "Use --split all, or a corpus with more documents."
        )
    return DocumentTokens(np.concatenate(kept), np.cumsum([0, *map(len, kept)]), num_bytes)


@torch.no_grad()
def evaluate_perplexity(
    decoder: Decoder,
    documents: DocumentTokens,
    *,
    window_tokens: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> PerplexityResult:
    """Score `documents`, cut to pieces of `window_tokens`, in the decoder's own precision.

    `on_progress` is told how many tokens are predicted so far. Raises ModelError where a
    log-probability is not finite.
    """
    longest = int(np.diff(documents.offsets).max()) - 1
    row_length = min(window_tokens, max(longest, _MICRO_BATCH_TOKENS))
    packed = PackedRows(documents.tokens, documents.offsets, sequence_length=row_length)
    rows_at_once = max(1, _MICRO_BATCH_TOKENS // row_length)
    costs: list[NDArray[np.float64]] = []
    for start in range(0, packed.num_rows, rows_at_once):
        rows = np.arange(start, min(start + rows_at_once, packed.num_rows))
        costs.append(_nats(decoder, packed.micro_batch(rows, is_padded=False)))
        on_progress(sum(map(len, costs)))
    document_of_token = np.repeat(packed.pieces.documents, packed.pieces.lengths)
    nats = np.zeros(documents.num_documents)
    np.add.at(nats, document_of_token, np.concatenate(costs))
    return _result(documents, nats, vocab_size=decoder.config.vocab_size)


def _nats(decoder: Decoder, batch: MicroBatch) -> NDArray[np.float64]:
    """What each token of a batch costs."""
    device = next(decoder.parameters()).device
    batch = batch.to(device)
    logprob_T = decoder(
        batch.tokens_T,
        positions_T=batch.positions_T,
        attend=PackedAttend(batch.document_lengths, device=device.type),
        readout=LogProbReadout(batch.targets_T),
    )
    nats_T = -logprob_T.double().cpu().numpy()
    if not np.isfinite(nats_T).all():
        raise ModelError(
            f"The model gives {int((~np.isfinite(nats_T)).sum())} of {len(nats_T)} tokens a "
            "probability that is no number. Its weights are damaged, or need more precision: "
            "--precision fp32."
        )
    return nats_T


def _result(
    documents: DocumentTokens, nats: NDArray[np.float64], *, vocab_size: int
) -> PerplexityResult:
    num_predictions = np.diff(documents.offsets) - 1
    num_tokens, num_bytes = int(num_predictions.sum()), documents.num_text_bytes
    model = _score(float(nats.sum()), num_tokens, num_bytes)
    counts = np.bincount(np.delete(documents.tokens, documents.offsets[:-1]))
    counts = counts[counts > 0]
    unigram = -float((counts * np.log(counts / num_tokens)).sum())
    standard_error = _ratio_standard_error(nats, num_predictions)
    return PerplexityResult(
        model=model,
        loss_standard_error=standard_error,
        perplexity_standard_error=standard_error and model.perplexity * standard_error,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        num_documents=documents.num_documents,
        baselines={
            "unigram": _score(unigram, num_tokens, num_bytes),
            "uniform": _score(num_tokens * math.log(vocab_size), num_tokens, num_bytes),
        },
    )


def _score(nats: float, num_tokens: int, num_bytes: int) -> Score:
    loss = nats / num_tokens
    if loss > _LARGEST_LOSS:
        raise ModelError(f"The model's loss is {loss:.0f} nats a token: its weights are damaged.")
    bits_per_byte = nats / math.log(2) / max(num_bytes, 1)
    return Score(perplexity=math.exp(loss), bits_per_byte=bits_per_byte, loss=loss)


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
