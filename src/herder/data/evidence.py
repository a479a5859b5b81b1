"""What a step of a run read: the documents of that very batch, where they are and what they say.

For the day after a loss spike. Places are found by reading the source again, so that what is shown
is what stands there. Owns finding and showing; which rows a step reads is the dataset's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from herder.config.run import DataConfig
from herder.data.corpus import TokenizedCorpus
from herder.data.dataset import TokenDataset
from herder.data.inspection import printable
from herder.data.progress import progress
from herder.data.sources import Place, is_held_out, open_source, placed_documents
from herder.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReadPiece:
    """A part of a document that a step read."""

    micro_batch: int
    row: int
    """Of the packed corpus."""
    document: int
    """Counted from 0 among those that are trained on."""
    place: Place
    first_token: int
    """Of the document."""
    num_tokens: int
    text: str
    """With the token after them, which is the last one's target."""

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "micro_batch": self.micro_batch,
            "row": self.row,
            "document": self.document,
            "file": str(self.place.path),
            "entry": self.place.entry,
            "byte_offset": self.place.offset,
            "first_token": self.first_token,
            "num_tokens": self.num_tokens,
            "text": self.text,
        }


def read_at(
    step: int,
    dataset: TokenDataset,
    corpus: TokenizedCorpus,
    config: DataConfig,
    tokenizer: Tokenizer,
) -> list[ReadPiece]:
    """All that step `step` (from 0) read on all ranks, in the order of its micro-batches.

    The source is read up to the last document in question. Raises DataError where that fails.
    """
    packed, offsets = dataset.packed, corpus.train.offsets
    found = [
        (number, row, piece)
        for number, rows in enumerate(dataset.rows(step).tolist())
        for row in rows
        for piece in range(*packed.row_pieces(row).indices(len(packed.pieces.starts)))
    ]
    places = _places({int(packed.pieces.documents[piece]) for *_, piece in found}, config)
    told = []
    for number, row, piece in found:
        document = int(packed.pieces.documents[piece])
        start, length = int(packed.pieces.starts[piece]), int(packed.pieces.lengths[piece])
        ids = packed.tokens[start : start + length + 1].tolist()
        told.append(
            ReadPiece(
                micro_batch=number,
                row=row,
                document=document,
                place=places[document],
                first_token=start - int(offsets[document]),
                num_tokens=length,
                text=tokenizer.decode(ids, skip_special_tokens=False),
            )
        )
    return told


def _places(wanted: set[int], config: DataConfig) -> dict[int, Place]:
    """Where these documents of the training split are."""
    source = open_source(config.source, text_key=config.text_key)
    places, number = dict[int, Place](), -1
    with progress(f"looking through {source.name}", max(wanted) + 1) as show:
        for place, text in placed_documents(source, max_documents=config.max_documents):
            if is_held_out(text, fraction=config.validation_fraction):
                continue
            number += 1
            if number in wanted:
                places[number] = place
                show(number)
            if len(places) == len(wanted):
                break
    return places


def evidence_view(pieces: Sequence[ReadPiece]) -> RenderableType:
    """Each part with its place and its text."""
    parts: list[RenderableType] = []
    for piece in pieces:
        offset = "" if piece.place.offset is None else f", byte {piece.place.offset:,}"
        end = piece.first_token + piece.num_tokens
        heading = (
            f"micro-batch {piece.micro_batch}, row {piece.row}: {piece.place}{offset}; document "
            f"{piece.document}, tokens {piece.first_token:,} to {end:,}"
        )
        parts += [Text(heading, style="bold cyan"), Text(printable(piece.text))]
    return Group(*parts)
