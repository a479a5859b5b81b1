"""What a model should compute, stored or made: rows of tokens with the logits they must give.

Owns the layout of a stored case: input_ids, attention_mask, position_ids [R, T], logits [R, T, V],
greedy [R, G] and, if known, hidden_row0 [L+1, T, D], one .npy file each; load-balancing losses, if
known, in meta.json. Padding is stripped on reading: rows are ragged from here on. Knows neither the
decoder nor where the numbers came from.

Legend: R rows, T tokens of one row, V vocabulary, G greedy tokens, L layers, D hidden.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from herder.errors import ModelError

_NAMES = ("input_ids", "attention_mask", "position_ids", "logits", "greedy")


@dataclass(frozen=True)
class Row:
    """One text without padding, and what was computed on it."""

    tokens_T: Tensor
    positions_T: Tensor
    logits_TV: Tensor
    greedy_G: Tensor
    """The tokens that follow it, each the most likely one."""
    num_pads: int = 0
    """How many tokens of padding stood in its row."""


@dataclass(frozen=True)
class Golden:
    """Rows that were computed together, as one batch."""

    origin: str
    """Who computed them: a folder, or a library and its version."""
    rows: tuple[Row, ...]
    hidden_LTD: Tensor | None
    """Of the first row: the embedding, then what each layer but the last returned, then the last
    layer's output after the final norm."""
    aux_loss: float | None = None
    """Load balancing of the routers over all rows without padding, before its coefficient."""
    aux_loss_row0: float | None = None
    """The same of the first row alone."""


def read_golden(folder: Path) -> Golden:
    """A stored case. Raises ModelError naming what is missing or does not fit."""
    names = [*_NAMES, *(["hidden_row0"] if (folder / "hidden_row0.npy").is_file() else [])]
    meta = _load_meta(folder / "meta.json")
    return build_golden(
        str(folder),
        aux_loss=meta.get("aux_loss_masked"),
        aux_loss_row0=meta.get("aux_loss_row0_nomask"),
        **{name: _load(folder / f"{name}.npy") for name in names},
    )


def build_golden(
    origin: str,
    *,
    aux_loss: float | None = None,
    aux_loss_row0: float | None = None,
    **arrays: NDArray[np.generic],
) -> Golden:
    """A case from its arrays by name: padding, wherever the mask is 0, stripped."""
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    ids, mask, positions, logits, greedy = (given[name] for name in _NAMES)
    if (ids.ndim, logits.ndim, greedy.ndim) != (2, 3, 2) or not (
        ids.shape == mask.shape == positions.shape == logits.shape[:2] and len(ids) == len(greedy)
    ):
        shapes = [arrays[name].shape for name in _NAMES]
        raise ModelError(
            f"{origin}: arrays of shapes {shapes} are not one case of rows and tokens."
        )
    kept = mask != 0
    rows = tuple(
        Row(
            tokens_T=ids[row].long()[keep],
            positions_T=positions[row].long()[keep],
            logits_TV=logits[row].float()[keep],
            greedy_G=greedy[row].long(),
            num_pads=int((~keep).sum()),
        )
        for row, keep in enumerate(kept)
    )
    hidden = given.get("hidden_row0")
    hidden_LTD = None if hidden is None else hidden.float()[:, kept[0]]
    return Golden(origin, rows, hidden_LTD, aux_loss, aux_loss_row0)


def _load_meta(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None


def _load(path: Path) -> NDArray[np.generic]:
    try:
        return np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing: a golden folder holds {', '.join(_NAMES)}, one .npy file each, "
            "and hidden_row0 for the layers."
        ) from None
    except (OSError, ValueError, EOFError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None
