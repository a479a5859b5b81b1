from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from herder.config.architecture import ArchitectureConfig
from herder.config.run import ClusterConfig, TrainConfig
from herder.plan.candidate import FULL, MIXED, Candidate, Request
from herder.plan.layout import Layout, make_layout
from herder.plan.memory import MemoryGb, layer_bytes_per_token, state_bytes, training_memory
from herder.plan.stages import ModelSizes, RankParameters

Published = Callable[[str], ArchitectureConfig]

N = 1_000_000
TRAIN = TrainConfig(sequence_length=4096, loss_chunk_tokens=512)


def layout(
    *, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, zero_stage: int = 0, copies: int = 1
) -> Layout:
    return make_layout(tp=tp, pp=pp, dp=dp, cp=1, ep=ep, zero_stage=zero_stage, copies=copies)


def memory(
    architecture: ArchitectureConfig, of: Layout, train: TrainConfig = TRAIN, **given: Any
) -> MemoryGb:
    request = Request(ModelSizes(architecture), ClusterConfig(gpu="h100-80gb"), train)
    workload = {"micro_batch_size": 1, "num_micro_batches": 8, "recompute": "none", **given}
    return training_memory(Candidate(request, of, **workload))


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(0, 16 * N), (1, 12 * N / 8 + 4 * N), (2, 14 * N / 8 + 2 * N), (3, 16 * N / 8)],
)
def test_the_16n_rule_by_zero_stage(stage: int, expected: float) -> None:
    assert state_bytes(RankParameters(dense=N), layout(dp=8, zero_stage=stage), MIXED) == expected


def test_experts_are_shared_by_the_ranks_that_hold_the_same_ones() -> None:
    of = layout(dp=8, ep=4, zero_stage=1)
    assert state_bytes(RankParameters(experts=N), of, MIXED) == 4 * N + 12 * N / 2


def test_sixteen_bytes_a_parameter_in_either_precision() -> None:
    for widths in (MIXED, FULL):
        assert widths.parameter + widths.gradient + widths.optimizer == 16


def test_llama_2_7b_on_eight_gpus(published: Published) -> None:
    parts = memory(published("llama-2-7b"), layout(dp=8, zero_stage=1))
    assert parts.state == pytest.approx(37.06, abs=0.01)
    assert parts.largest_rank_state == pytest.approx(parts.state)


def test_the_405b_plan_and_its_largest_rank(published: Published) -> None:
    of = layout(tp=8, pp=4, dp=512, zero_stage=1)
    train = TRAIN.model_copy(update={"sequence_length": 8192})
    llama = published("llama-3.1-405b")
    parts = memory(llama, of, train, recompute="full", num_micro_batches=4)
    assert 50.9 <= parts.state <= 51.1
    assert parts.largest_rank_state >= 51.3
    assert parts.total <= parts.budget


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_a_higher_zero_stage_never_keeps_more(name: str, published: Published) -> None:
    states = [memory(published(name), layout(dp=8, zero_stage=s)).state for s in range(4)]
    assert states == sorted(states, reverse=True)


def test_state_is_shared_out_within_one_copy_of_it(published: Published) -> None:
    llama = published("llama-3-8b")
    copied = memory(llama, layout(dp=16, zero_stage=3, copies=2))
    one = memory(llama, layout(dp=8, zero_stage=3))
    assert copied.state == one.state
    assert copied.largest_rank_state == one.largest_rank_state


def test_fp32_reduction_keeps_whole_fp32_gradients_while_zero_1_accumulates(
    published: Published,
) -> None:
    in_fp32 = TRAIN.model_copy(update={"gradient_dtype": "fp32"})
    llama, num = published("llama-2-7b"), 6_738_415_616
    for stage, more in ((0, 0), (1, 2 * num), (2, 0), (3, 0)):
        of = layout(dp=8, zero_stage=stage)
        half, full = memory(llama, of), memory(llama, of, in_fp32)
        assert full.state == half.state, "the 16N rule is for bf16"
        grown = (full.largest_rank_state - half.largest_rank_state) * 1e9
        assert grown == pytest.approx(more)


def test_more_shards_never_keep_more(published: Published) -> None:
    states = [memory(published("llama-3-8b"), layout(dp=n, zero_stage=1)).state for n in (2, 8, 64)]
    assert states == sorted(states, reverse=True)


def test_recompute_and_smaller_batches_take_less(published: Published) -> None:
    of = layout(dp=8, zero_stage=1)
    one = memory(published("llama-3-8b"), of).activations
    two = memory(published("llama-3-8b"), of, micro_batch_size=2).activations
    again = memory(published("llama-3-8b"), of, recompute="full").activations
    assert two == pytest.approx(2 * one)
    assert again < one / 3


def test_a_stage_keeps_a_micro_batch_for_each_stage_behind_it(published: Published) -> None:
    of = layout(tp=8, pp=4, dp=2, zero_stage=1)
    kept = {
        times: memory(published("llama-3-70b"), of, num_micro_batches=times).activations
        for times in (1, 2, 4, 8)
    }
    assert kept[1] < kept[2] < kept[4] == kept[8]


def test_layers_weigh_less_on_the_ends_of_a_pipeline(published: Published) -> None:
    sizes = ModelSizes(published("llama-3.1-405b"))
    assert sizes.layers_per_stage(4) == (31, 32, 32, 31)


@pytest.mark.parametrize("pp", [1, 2, 3, 7, 30])
def test_stages_hold_every_layer_once(pp: int, published: Published) -> None:
    sizes = ModelSizes(published("smollm2-135m"))
    counts = sizes.layers_per_stage(pp)
    assert sum(counts) == 30
    assert min(counts) >= 1
    held = sum(sizes.stage_on_rank(pp, s, tp=1, ep=1).total for s in range(pp))
    copied = 49_152 * 576 if pp > 1 else 0
    assert held == 134_515_008 + copied


def test_one_rank_keeps_fp32_parameters_and_their_bf16_copies(published: Published) -> None:
    smollm = published("smollm2-135m")
    parts = memory(smollm, layout())
    assert parts.state == pytest.approx(16 * 0.134515008)
    assert parts.buffers == pytest.approx(2 * 0.134515008)
    assert memory(smollm, layout(), TRAIN.model_copy(update={"precision": "fp32"})).buffers == 0


def test_logits_exist_for_one_chunk_at_a_time(published: Published) -> None:
    half = TRAIN.model_copy(update={"loss_chunk_tokens": 256})
    of = layout(dp=8, zero_stage=1)
    whole = memory(published("qwen3-8b"), of).logits
    assert memory(published("qwen3-8b"), of, half).logits == pytest.approx(whole / 2)
    assert whole == pytest.approx(512 * 151_936 * 10 / 1e9)


def test_a_routed_layer_keeps_each_token_once_for_each_of_its_experts(published: Published) -> None:
    """By hand, of one token in bf16: two residuals in, q, k, v and attention's output, one normed
    input; k rows in and out, k gates and ups; in fp32 a number a head, the router's input and three
    numbers an expert."""
    mixtral = published("mixtral-8x7b")
    request = Request(ModelSizes(mixtral), ClusterConfig(gpu="h100-80gb"), TRAIN)
    candidate = Candidate(request, layout(dp=8, zero_stage=1), 1, 1, "none")
    residual, attention = 2 * 4096, 4096 + 2 * 4096 + 2 * 1024
    rows, gated = 2 * 2 * 4096, 2 * 2 * 14_336
    in_bf16, in_fp32 = residual + attention + rows + gated, 32 + 4096 + 3 * 8
    found = layer_bytes_per_token(candidate, mixtral.layers[0])
    assert found == 2 * in_bf16 + 4 * in_fp32


def test_spread_experts_take_less_state_and_as_many_activations(published: Published) -> None:
    whole, spread = (
        memory(published("mixtral-8x7b"), layout(dp=8, ep=ep, zero_stage=1)) for ep in (1, 8)
    )
    assert spread.activations == whole.activations
    experts = 32 * 8 * 3 * 4096 * 14_336
    dense = 46_702_792_704 - experts
    assert whole.state == pytest.approx((4 + 12 / 8) * (dense + experts) / 1e9)
    assert spread.state == pytest.approx(((4 + 12 / 8) * dense + 16 * experts / 8) / 1e9)
