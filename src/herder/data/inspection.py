"""What a corpus looks like to a model: counts, lengths, how it packs, and a batch as text.

Owns the figures and how people see them. It changes nothing and knows no model.
"""

from __future__ import annotations

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


def summarize(corpus: TokenizedCorpus, packed: PackedRows) -> dict[str, Any]:
    """The figures of `corpus`, whose training split is `packed`, as one JSON object.

    Of the training split, but for those that begin with num_validation. `utilization` is the share
    of a batch's tokens that are not padding, `num_cut_documents` are longer than a row, `lengths`
    are bins that double.
    """
    lengths = np.diff(corpus.train.offsets)
    return {
        "source": corpus.name,
        "fingerprint": corpus.fingerprint,
        "folder": str(corpus.folder),
        "num_documents": corpus.train.num_documents,
        "num_tokens": corpus.train.num_tokens,
        "num_text_bytes": corpus.train.num_text_bytes,
        "bytes_per_token": round(corpus.train.num_text_bytes / corpus.train.num_tokens, 3),
        "sequence_length": packed.sequence_length,
        "num_rows": packed.num_rows,
        "utilization": round(packed.utilization, 4),
        "num_cut_documents": int((lengths - 1 > packed.sequence_length).sum()),
        "lengths": _length_bins(lengths),
        "num_validation_documents": corpus.validation.num_documents,
        "num_validation_tokens": corpus.validation.num_tokens,
    }


def _length_bins(lengths: NDArray[np.int64]) -> list[dict[str, int]]:
    """Bins that double, of documents of at least `first` and less than `end` tokens."""
    exponents = np.frexp(np.maximum(lengths, 1))[1] - 1
    bins = []
    for exponent in range(exponents.min(), exponents.max() + 1):
        inside = lengths[exponents == exponent]
        figures = {"num_documents": len(inside), "num_tokens": int(inside.sum())}
        bins.append({"first": 2**exponent, "end": 2 ** (exponent + 1), **figures})
    return bins


def summary_view(figures: dict[str, Any]) -> RenderableType:
    """What `summarize` gives, as tables."""
    facts = Table.grid(padding=(0, 2))
    for name, value in figures.items():
        if name != "lengths":
            shown = value if isinstance(value, str) else f"{value:,}"
            facts.add_row(Text(name.replace("_", " "), style="dim"), Text(shown, overflow="fold"))
    histogram = Table(box=None, header_style="dim", pad_edge=False)
    histogram.add_column("tokens", justify="right")
    histogram.add_column("documents", justify="right")
    histogram.add_column("share of tokens")
    for each in figures["lengths"]:
        share = each["num_tokens"] / max(figures["num_tokens"], 1)
        bar = "█" * round(share * _BAR_COLUMNS)
        histogram.add_row(
            f"{each['first']:,} - {each['end'] - 1:,}",
            f"{each['num_documents']:,}",
            f"{bar} {share:.1%}",
        )
    return Group(facts, "", histogram)


def printable(text: str) -> str:
    """A corpus' text without what would steer the terminal it is shown on."""
    return text.translate(_CONTROL_CHARACTERS)


def row_view(
    packed: PackedRows, documents: DocumentTokens, tokenizer: Tokenizer, row: int
) -> RenderableType:
    """One packed row as text, a colour and a heading for each document in it."""
    parts: list[RenderableType] = []
    inside = packed.row_pieces(row)
    pieces = zip(
        packed.pieces.documents[inside].tolist(),
        packed.pieces.starts[inside].tolist(),
        packed.pieces.lengths[inside].tolist(),
        strict=True,
    )
    for index, (document, start, length) in enumerate(pieces):
        first = start - int(documents.offsets[document])
        heading = f"document {document}, tokens {first} to {first + length}"
        # One token more than is read: the last target.
        ids = packed.tokens[start : start + length + 1].tolist()
        text = printable(tokenizer.decode(ids, skip_special_tokens=False))
        parts += [Text(heading, style="dim"), Text(text, style=_COLOURS[index % len(_COLOURS)])]
    return Group(*parts)
