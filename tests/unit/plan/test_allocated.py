"""What the largest rank's tensors take: padding, dtypes, and when it is there."""

from __future__ import annotations

import pytest

from herder.plan.allocated import HeldNumbers, HeldWeights, allocated_state, sharded_dim

N, ROUTER = 1000, 10
HELD = HeldWeights(
    HeldNumbers(whole=8 * N, share=N, gathered=8 * N, tensors=3),
    HeldNumbers(whole=8 * ROUTER, share=ROUTER, gathered=8 * ROUTER, tensors=1),
)


@pytest.mark.parametrize(
    ("shape", "num_shards", "dim"),
    [
        ((4096, 4096), 8, 0),
        ((128, 16_384), 512, 1),
        ((8, 14_336, 4096), 32, 1),
        ((8, 14_335, 4096), 32, 2),
        ((7, 5), 4, 0),
        ((7,), 4, 0),
    ],
)
def test_the_first_dim_that_divides_evenly_is_sharded(
    shape: tuple[int, ...], num_shards: int, dim: int
) -> None:
    assert sharded_dim(shape, num_shards) == dim


def test_an_uneven_shard_counts_with_its_padding() -> None:
    held = HeldNumbers().plus((7, 5), num_shards=4, times=3)
    assert held == HeldNumbers(whole=105, share=30, gathered=120, tensors=3)


@pytest.mark.parametrize(
    ("zero_stage", "gradient_bytes", "gathered", "accumulated"),
    [
        (0, 4, 0, 4 * 8 * (N + ROUTER)),
        (1, 2, 2 * 8 * N + 4 * 8 * ROUTER, 2 * 8 * N + 4 * 8 * ROUTER),
        (1, 4, 2 * 8 * N + 4 * 8 * ROUTER, 4 * 8 * (N + ROUTER)),
        (2, 2, 2 * 8 * N + 4 * 8 * ROUTER, 4 * (N + ROUTER)),
        (3, 4, 0, 4 * (N + ROUTER)),
    ],
)
def test_what_is_allocated_by_zero_stage_and_gradient_dtype(
    zero_stage: int, gradient_bytes: int, gathered: int, accumulated: int
) -> None:
    state = allocated_state(
        HELD, stage=0, zero_stage=zero_stage, compute_bytes=2, gradient_bytes=gradient_bytes
    )
    kept = (N + ROUTER) * (8 if zero_stage == 0 else 1)
    assert (state.gathered_parameters, state.accumulated_gradients) == (gathered, accumulated)
    assert state.parameters == state.reduced_gradients == 4 * kept
    assert state.optimizer == 8 * kept + 4 * 4
    assert state.total == 12 * kept + 16 + max(gathered + accumulated, 4 * kept)
