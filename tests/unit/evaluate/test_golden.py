from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from herder.errors import ModelError
from herder.evaluate.golden import build_golden, read_golden


def arrays() -> dict[str, Any]:
    """Two rows of 5 tokens, the second padded by 2 on the left; 7 words, hidden 3, 2 layers."""
    mask = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    return {
        "input_ids": np.arange(10).reshape(2, 5) % 7,
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(-1) - 1, 0),
        "logits": np.arange(70, dtype=np.float32).reshape(2, 5, 7),
        "greedy": np.array([[1, 2], [3, 4]]),
        "hidden_row0": np.zeros((3, 5, 3), np.float32),
    }


def save(folder: Path, **changes: Any) -> Path:
    for name, array in {**arrays(), **changes}.items():
        if array is not None:
            np.save(folder / f"{name}.npy", array)
    return folder


def test_padding_is_stripped_and_positions_are_those_stored(tmp_path: Path) -> None:
    golden = read_golden(save(tmp_path))
    first, second = golden.rows
    assert first.tokens_T.tolist() == [0, 1, 2, 3, 4]
    assert second.tokens_T.tolist() == [0, 1, 2]
    assert second.positions_T.tolist() == [0, 1, 2]
    assert second.logits_TV.tolist() == arrays()["logits"][1, 2:].tolist()
    assert second.greedy_G.tolist() == [3, 4]
    assert golden.hidden_LTD is not None
    assert golden.hidden_LTD.shape == (3, 5, 3)


def test_rows_know_their_padding_and_the_routers_losses_come_from_meta_json(tmp_path: Path) -> None:
    golden = read_golden(save(tmp_path))
    assert [row.num_pads for row in golden.rows] == [0, 2]
    assert (golden.aux_loss, golden.aux_loss_row0) == (None, None)
    meta = {"aux_loss_masked": 2.5, "aux_loss_row0_nomask": 2.25, "quirks": "none"}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    golden = read_golden(tmp_path)
    assert (golden.aux_loss, golden.aux_loss_row0) == (2.5, 2.25)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(ModelError, match=r"meta\.json cannot be read"):
        read_golden(tmp_path)


def test_hidden_states_lose_the_first_rows_padding() -> None:
    mask = np.array([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    golden = build_golden("here", **{**arrays(), "attention_mask": mask})
    assert golden.hidden_LTD is not None
    assert golden.hidden_LTD.shape == (3, 4, 3)


def test_hidden_states_may_be_absent(tmp_path: Path) -> None:
    assert read_golden(save(tmp_path, hidden_row0=None)).hidden_LTD is None


@pytest.mark.parametrize("name", ["input_ids", "logits", "greedy"])
def test_a_missing_array_is_named_with_all_that_there_must_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=rf"{name}\.npy is missing: a golden folder holds"):
        read_golden(save(tmp_path, **{name: None}))


def test_a_damaged_array_is_named(tmp_path: Path) -> None:
    path = save(tmp_path) / "logits.npy"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelError, match=r"logits\.npy cannot be read"):
        read_golden(tmp_path)


def test_arrays_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ModelError, match="are not one case"):
        build_golden("here", **{**arrays(), "greedy": np.zeros((3, 2), int)})
