"""What a model should compute, stored or made: rows of tokens with the logits they must give.

Owns the layout of a stored case: input_ids, attention_mask, position_ids [R, T], logits [R, T, V],
greedy [R, G] and hidden_row0 [L+1, T, D], one .npy file each. Padding is stripped on reading: rows
are ragged from here on. Knows neither the decoder nor where the numbers came from.

Legend: R rows, T tokens of one row, V vocabulary, G greedy tokens, L layers, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from herder.errors import ModelError


@dataclass(frozen=True)
class Row:
    """One text without padding, and what was computed on it."""

    tokens_T: Tensor
    positions_T: Tensor
    logits_TV: Tensor
    greedy_G: Tensor
    """The tokens that follow it, each the most likely one."""


@dataclass(frozen=True)
class Golden:
    """Rows that were computed together, as one batch."""

    origin: str
    """Who computed them: a folder, or a library and its version."""
    rows: tuple[Row, ...]
    hidden_LTD: Tensor | None
    """Of the first row: the embedding, then what each layer but the last returned, then the last
    layer's output after the final norm."""


def read_golden(folder: Path) -> Golden:
    """A stored case. Raises ModelError naming what is missing or does not fit."""
    arrays = {
        name: _load(folder / f"{name}.npy")
        for name in ("input_ids", "attention_mask", "position_ids", "logits", "greedy")
    }
    hidden = folder / "hidden_row0.npy"
    return build_golden(
        str(folder), **arrays, hidden_row0=_load(hidden) if hidden.is_file() else None
    )


def build_golden(
    origin: str,
    *,
    input_ids: NDArray[np.generic],
    attention_mask: NDArray[np.generic],
    position_ids: NDArray[np.generic],
    logits: NDArray[np.generic],
    greedy: NDArray[np.generic],
    hidden_row0: NDArray[np.generic] | None,
) -> Golden:
    """A case from its arrays: padding, wherever the mask is 0, stripped."""
    shape = input_ids.shape
    if len(shape) != 2 or not (
        attention_mask.shape == position_ids.shape == logits.shape[:2] == shape
        and logits.ndim == 3
        and greedy.ndim == 2
        and len(greedy) == len(input_ids)
    ):
        given = [array.shape for array in (input_ids, attention_mask, position_ids, logits, greedy)]
        raise ModelError(f"{origin}: arrays of shapes {given} are not one case of rows and tokens.")
    kept = [torch.from_numpy(mask != 0) for mask in attention_mask]
    rows = tuple(
        Row(
            tokens_T=torch.from_numpy(input_ids[row]).long()[keep],
            positions_T=torch.from_numpy(position_ids[row]).long()[keep],
            logits_TV=torch.from_numpy(logits[row]).float()[keep],
            greedy_G=torch.from_numpy(greedy[row]).long(),
        )
        for row, keep in enumerate(kept)
    )
    hidden = None if hidden_row0 is None else torch.from_numpy(hidden_row0).float()[:, kept[0]]
    return Golden(origin, rows, hidden)


def _load(path: Path) -> NDArray[np.generic]:
    try:
        return np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing: a golden folder holds input_ids, attention_mask, position_ids, "
            "logits and greedy, one .npy file each, and hidden_row0 for the layers."
        ) from None
    except (OSError, ValueError, EOFError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None
