"""The margin of choices that verification asks for, so that rounding alone flips none of them."""

from __future__ import annotations

import pytest
import torch

from herder.train.verify_choices import ClosestChoice


def test_the_closest_choice_is_the_smallest_gap_behind_what_was_chosen_last() -> None:
    with ClosestChoice() as watch:
        torch.tensor([[4.0, 1.0, 3.0], [8.0, 7.0, 0.0]]).topk(1, dim=-1)
        assert watch.margin == pytest.approx(1 / 8)
        torch.tensor([[4.0, 1.0, 3.0], [8.0, 6.0, 5.4]]).topk(2, dim=-1)
    assert watch.margin == pytest.approx(0.1)
    torch.tensor([1.0, 1.0]).topk(1)
    assert watch.margin == pytest.approx(0.1), "nothing is watched outside"


def test_choices_among_all_or_of_none_left_are_not_close() -> None:
    with ClosestChoice() as watch:
        torch.tensor([[1.0, 1.0]]).topk(2)
        torch.tensor([[2.0, -torch.inf, -torch.inf]]).topk(1)
    assert watch.margin == torch.inf
