"""Random states: the next draws after a restore are those after the capture."""

import json
import random

import numpy as np
import pytest
import torch

from herder.checkpoint.random_state import capture_random_state, restore_random_state
from herder.errors import CheckpointError


def draws() -> list[float]:
    gauss = [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(()))]
    return [*gauss, random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_all_generators_go_on_where_they_were_captured_through_json() -> None:
    draws()
    state = json.loads(json.dumps(capture_random_state()))
    expected = [draws(), draws()]
    draws()
    restore_random_state(state)
    assert [draws(), draws()] == expected


def test_a_state_that_is_not_one_is_refused() -> None:
    state = capture_random_state()
    del state["numpy"]
    with pytest.raises(CheckpointError, match="random states"):
        restore_random_state(state)
