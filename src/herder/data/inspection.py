"""What a corpus looks like to a model: counts, lengths, how it packs, and a batch as text.

Owns the figures and how people see them. It changes nothing and knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from herder.data.corpus import DocumentTokens, TokenizedCorpus
from herder.data.packing import PackedRows
from herder.data.tokenizer import Tokenizer

_COLOURS = ("cyan", "yellow", "green", "magenta")
_BAR_COLUMNS = 40
_CONTROL_CHARACTERS = dict.fromkeys({*range(32)} - {9, 10}, "\N{REPLACEMENT CHARACTER}")
"""A corpus must not steer the terminal it is shown on."""


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Documents of at least `first` and less than `end` tokens."""

    first: int
    end: int
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class CorpusSummary:
    """The figures of a corpus, packed at one sequence length."""

    source: str
    fingerprint: str
    folder: str
    num_documents: int
    """Of the training split, as all that follows but the last two."""
    num_tokens: int
    num_text_bytes: int
    sequence_length: int
    num_rows: int
    utilization: float
    """The share of a batch's tokens that are not padding."""
    num_cut_documents: int
    """Longer than a row."""
    lengths: tuple[LengthBin, ...]
    num_validation_documents: int
    num_validation_tokens: int

    def to_json(self) -> dict[str, Any]:
        """All of it, for scripts."""
        return {**self.__dict__, "lengths": [vars(each) for each in self.lengths]}


def summarize(corpus: TokenizedCorpus, packed: PackedRows) -> CorpusSummary:
    """The figures of `corpus`, whose training split is `packed`."""
    lengths = np.diff(corpus.train.offsets)
    return CorpusSummary(
        source=corpus.name,
        fingerprint=corpus.fingerprint,
        folder=str(corpus.folder),
        num_documents=corpus.train.num_documents,
        num_tokens=corpus.train.num_tokens,
        num_text_bytes=corpus.train.num_text_bytes,
        sequence_length=packed.sequence_length,
        num_rows=packed.num_rows,
        utilization=packed.utilization,
        num_cut_documents=int((lengths - 1 > packed.sequence_length).sum()),
        lengths=_length_bins(lengths),
        num_validation_documents=corpus.validation.num_documents,
        num_validation_tokens=corpus.validation.num_tokens,
    )


def _length_bins(lengths: NDArray[np.int64]) -> tuple[LengthBin, ...]:
    """Bins that double, from the shortest document's to the longest's."""
    exponents = np.frexp(np.maximum(lengths, 1))[1] - 1
    bins = []
    for exponent in range(int(exponents.min()), int(exponents.max()) + 1):
        inside = lengths[exponents == exponent]
        bins.append(
            LengthBin(
                first=2**exponent,
                end=2 ** (exponent + 1),
                num_documents=len(inside),
                num_tokens=int(inside.sum()),
            )
        )
    return tuple(bins)


def summary_view(summary: CorpusSummary) -> RenderableType:
    """The figures as tables."""
    facts = Table.grid(padding=(0, 2))
    rows = {
        "corpus": summary.source,
        "training": f"{summary.num_documents:,} documents, {summary.num_tokens:,} tokens, "
        f"{summary.num_text_bytes / max(summary.num_tokens, 1):.2f} bytes a token",
        "held out": f"{summary.num_validation_documents:,} documents, "
        f"{summary.num_validation_tokens:,} tokens",
        "packed": f"{summary.num_rows:,} rows of {summary.sequence_length:,} tokens, "
        f"{summary.utilization:.2%} of them in use",
        "cut": f"{summary.num_cut_documents:,} documents are longer than a row",
        "stored in": summary.folder,
    }
    for name, value in rows.items():
        facts.add_row(Text(name, style="dim"), value)
    return Group(facts, "", _histogram(summary.lengths))


def _histogram(bins: tuple[LengthBin, ...]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column("documents", justify="right")
    table.add_column("share of tokens")
    total = sum(each.num_tokens for each in bins)
    for each in bins:
        share = each.num_tokens / max(total, 1)
        bar = "█" * round(share * _BAR_COLUMNS)
        table.add_row(
            f"{each.first:,} - {each.end - 1:,}", f"{each.num_documents:,}", f"{bar} {share:.1%}"
        )
    return table


def row_view(
    packed: PackedRows, documents: DocumentTokens, tokenizer: Tokenizer, row: int
) -> RenderableType:
    """One packed row as text, a colour and a heading for each document in it."""
    parts: list[RenderableType] = []
    for index, piece in enumerate(packed.row_pieces(row)):
        start, length = int(packed.pieces.starts[piece]), int(packed.pieces.lengths[piece])
        document = int(packed.pieces.documents[piece])
        first = start - int(documents.offsets[document])
        whole = int(np.diff(documents.offsets)[document])
        heading = f"document {document}, tokens {first} to {first + length} of {whole}"
        # One token more than is read: the last target.
        ids = packed.tokens[start : start + length + 1].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False).translate(_CONTROL_CHARACTERS)
        parts += [Text(heading, style="dim"), Text(text, style=_COLOURS[index % len(_COLOURS)])]
    used = sum(int(packed.pieces.lengths[piece]) for piece in packed.row_pieces(row))
    parts.append(Text(f"{packed.sequence_length - used} tokens of padding", style="dim"))
    return Group(*parts)
