"""Documents into rows of exactly `sequence_length` tokens, and rows into micro-batches.

A document of n tokens makes n - 1 predictions: it is read as tokens[:-1] with targets tokens[1:],
cut into pieces of at most a row's length, of which a continued one has its true next token as its
last target. Pieces are placed best-fit, longest first: each goes whole to the row with the least
space left. Joining all documents into one stream would pad nothing, but cuts most of them, which
costs accuracy (Source: arXiv:2404.10830, where best-fit packing is from); this pads about a
percent. Rows depend on the lengths alone: no micro-batch size or world size moves a piece.

Owns placing and assembling; it knows nothing of text, files or the order in which rows are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from herder.data.batch import MicroBatch


@dataclass(frozen=True)
class Pieces:
    """Parts of documents, none longer than a row. P pieces; all arrays have P entries."""

    starts: NDArray[np.int64]
    """Where in the corpus' tokens a piece begins."""
    lengths: NDArray[np.int64]
    """How many tokens it reads; the token after them exists and is its last target."""
    documents: NDArray[np.int64]
    """Which document it is a part of."""


def cut(document_offsets: NDArray[np.int64], *, sequence_length: int) -> Pieces:
    """Pieces of at most `sequence_length` tokens of documents that lie end to end.

    `document_offsets` has one entry more than there are documents: document d is
    tokens[offsets[d] : offsets[d + 1]]. Documents of fewer than two tokens make no piece.
    """
    num_predictions = np.maximum(np.diff(document_offsets) - 1, 0)
    num_pieces = -(-num_predictions // sequence_length)
    documents = np.repeat(np.arange(len(num_pieces)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    skipped = (np.arange(len(documents)) - first_piece[documents]) * sequence_length
    return Pieces(
        starts=document_offsets[documents] + skipped,
        lengths=np.minimum(num_predictions[documents] - skipped, sequence_length),
        documents=documents,
    )


def best_fit_rows(lengths: NDArray[np.int64], *, row_length: int) -> NDArray[np.int64]:
    """The row of each piece, by best-fit decreasing; rows are numbered from 0.

    Rows with space left are kept in one list per amount of space, and a bit mask tells which lists
    are not empty, so the tightest fit is the mask's lowest bit at or above the piece's length.
    """
    rows = np.empty(len(lengths), dtype=np.int64)
    open_rows: list[list[int]] = [[] for _ in range(row_length)]
    spaces = 0
    num_rows = 0
    decreasing = np.argsort(-lengths, kind="stable")
    for piece, length in zip(decreasing.tolist(), lengths[decreasing].tolist(), strict=True):
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                spaces ^= 1 << space
        else:
            space, row = row_length, num_rows
            num_rows += 1
        rows[piece] = row
        if left := space - length:
            open_rows[left].append(row)
            spaces |= 1 << left
    return rows


class PackedRows:
    """A corpus packed into rows of `sequence_length` tokens, any of which can be read at once."""

    def __init__(
        self,
        tokens: NDArray[np.integer],
        document_offsets: NDArray[np.int64],
        *,
        sequence_length: int,
    ) -> None:
        """`tokens`: all documents end to end, any integer dtype, possibly memory-mapped."""
        self.tokens = tokens
        self.sequence_length = sequence_length
        pieces = cut(document_offsets, sequence_length=sequence_length)
        row_of_piece = best_fit_rows(pieces.lengths, row_length=sequence_length)
        by_row = np.argsort(row_of_piece, kind="stable")
        self.pieces = Pieces(
            pieces.starts[by_row], pieces.lengths[by_row], pieces.documents[by_row]
        )
        self.num_rows = int(row_of_piece.max(initial=-1)) + 1
        self._row_bounds = np.cumsum([0, *np.bincount(row_of_piece)])

    @property
    def utilization(self) -> float:
        """The share of tokens that are not padding."""
        return int(self.pieces.lengths.sum()) / max(self.num_rows * self.sequence_length, 1)

    def row_pieces(self, row: int) -> slice:
        """Which pieces lie in `row`, in order."""
        return slice(*self._row_bounds[row : row + 2].tolist())

    def micro_batch(self, rows: NDArray[np.int64], *, is_padded: bool = True) -> MicroBatch:
        """The given rows side by side: T = len(rows) * sequence_length tokens.

        Without padding T is less; evaluation, which asks for no equal sizes, saves its cost.
        """
        starts: list[int] = []
        lengths: list[int] = []
        for row in rows.tolist():
            inside = self.row_pieces(row)
            starts += self.pieces.starts[inside].tolist()
            lengths += self.pieces.lengths[inside].tolist()
            padding = self.sequence_length - int(self.pieces.lengths[inside].sum())
            if padding and is_padded:
                starts.append(-1)
                lengths.append(padding)
        return _assemble(self.tokens, np.array(starts), np.array(lengths))


def _assemble(
    tokens: NDArray[np.integer], start_P: NDArray[np.int64], length_P: NDArray[np.int64]
) -> MicroBatch:
    """A micro-batch of pieces; a start of -1 is padding, which reads token 0 with weight 0."""
    begin_P = np.cumsum(length_P) - length_P
    positions_T = np.arange(length_P.sum()) - np.repeat(begin_P, length_P)
    real_T = np.repeat(start_P >= 0, length_P)
    source_T = (np.repeat(start_P, length_P) + positions_T)[real_T]
    tokens_T, targets_T = np.zeros_like(positions_T), np.zeros_like(positions_T)
    tokens_T[real_T] = tokens[source_T]
    targets_T[real_T] = tokens[source_T + 1]
    return MicroBatch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(positions_T),
        targets_T=torch.from_numpy(targets_T),
        weights_T=torch.from_numpy(real_T.astype(np.float32)),
        real_T=torch.from_numpy(real_T),
        document_lengths=tuple(length_P.tolist()),
    )
