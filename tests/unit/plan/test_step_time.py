from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import gpu
from herder.config.run import ClusterConfig, TrainConfig
from herder.plan.candidate import Candidate, Request
from herder.plan.flops import flops_per_token
from herder.plan.layout import make_layout
from herder.plan.stages import ModelSizes
from herder.plan.step_time import (
    COLLECTIVE_BANDWIDTH_SHARE,
    StepTimeSeconds,
    collective,
    peak_flops,
    simulate_step,
)

Published = Callable[[str], ArchitectureConfig]

TRAIN = TrainConfig(sequence_length=4096)


def cluster(nodes: int, gpu: str = "h100-80gb", gpus_per_node: int = 8) -> ClusterConfig:
    return ClusterConfig(nodes=nodes, gpus_per_node=gpus_per_node, gpu=gpu)


def step(
    architecture: ArchitectureConfig,
    on: ClusterConfig,
    train: TrainConfig = TRAIN,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    zero_stage: int = 1,
    **given: Any,
) -> StepTimeSeconds:
    dp = on.num_gpus // (tp * pp * cp)
    layout = make_layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, zero_stage=zero_stage)
    workload = {"micro_batch_size": 1, "num_micro_batches": 8, "recompute": "none", **given}
    return simulate_step(
        Candidate(Request(ModelSizes(architecture), on, train), layout, **workload)
    )


def test_matrix_products_take_at_least_their_flops_at_peak(published: Published) -> None:
    architecture = published("llama-3-8b")
    found = step(architecture, cluster(1))
    flops = flops_per_token(architecture, sequence_length=4096) * 4096 * 8
    assert found.matmul + found.attention > flops / 989.4e12


def test_the_bubble_is_stages_less_one_over_micro_batches(published: Published) -> None:
    found = step(published("llama-3-70b"), cluster(4), tp=8, pp=4)
    work = found.matmul + found.attention + found.memory_traffic + found.tensor_parallel
    assert found.pipeline_bubble == pytest.approx(work * 3 / 8)


def test_more_micro_batches_shrink_the_share_of_the_bubble(published: Published) -> None:
    shares = []
    for times in (4, 16, 64):
        found = step(published("llama-3-70b"), cluster(4), tp=8, pp=4, num_micro_batches=times)
        shares.append(found.pipeline_bubble / found.total)
    assert shares == sorted(shares, reverse=True)


def test_recompute_costs_a_forward_pass(published: Published) -> None:
    once = step(published("llama-3-8b"), cluster(1))
    again = step(published("llama-3-8b"), cluster(1), recompute="full")
    work = once.matmul + once.attention + once.memory_traffic
    assert again.recompute == pytest.approx(work / 3)


def test_zero_3_communicates_more_than_zero_1(published: Published) -> None:
    slow = cluster(8).model_copy(update={"inter_node_bandwidth_gb_per_second": 1.0})
    low = step(published("llama-3-8b"), slow, zero_stage=1)
    high = step(published("llama-3-8b"), slow, zero_stage=3)
    assert high.data_parallel > low.data_parallel > 0


def test_slower_links_never_help(published: Published) -> None:
    totals = []
    for bandwidth in (100.0, 10.0, 1.0, 0.1):
        on = cluster(8).model_copy(update={"inter_node_bandwidth_gb_per_second": bandwidth})
        totals.append(step(published("llama-3-8b"), on, zero_stage=3).total)
    assert totals == sorted(totals)


def test_tensor_parallelism_costs_communication_in_the_node(published: Published) -> None:
    architecture = published("llama-3-8b")
    assert step(architecture, cluster(1), tp=1).tensor_parallel == 0
    assert step(architecture, cluster(1), tp=8).tensor_parallel > 0


def test_experts_pay_all_to_all_only_when_spread(published: Published) -> None:
    architecture = published("qwen3-30b-a3b")
    assert step(architecture, cluster(2)).expert_parallel == 0
    assert step(architecture, cluster(2), ep=8).expert_parallel > 0


def test_a_newer_gpu_is_faster(published: Published) -> None:
    totals = [
        step(published("llama-3-8b"), cluster(1, name)).total
        for name in ("v100-32gb", "a100-80gb", "h100-80gb", "b200")
    ]
    assert totals == sorted(totals, reverse=True)


def test_small_models_wait_for_launches_on_a_gpu_and_not_on_a_cpu(published: Published) -> None:
    small = TrainConfig(sequence_length=128)
    architecture = published("smollm2-135m")
    assert step(architecture, cluster(1, "b200", 1), small, zero_stage=0).launch > 0
    assert step(architecture, cluster(1, "cpu", 1), small, zero_stage=0).launch == 0


def test_fp32_runs_at_the_fp32_peak() -> None:
    assert peak_flops(gpu("h100-80gb"), "bf16") == pytest.approx(989.4e12)
    assert peak_flops(gpu("h100-80gb"), "fp32") == pytest.approx(66.9e12)


def test_a_group_within_the_node_uses_its_links() -> None:
    on, device = cluster(4), gpu("h100-80gb")
    inside, across, strided = (
        collective(on, device, num_ranks, stride) for num_ranks, stride in ((8, 1), (32, 1), (4, 8))
    )
    assert inside.bytes_per_second > across.bytes_per_second > strided.bytes_per_second
    assert collective(on, device, 1, 1).seconds(1e9) == 0.0


def test_in_an_exchange_most_of_what_a_device_sends_leaves_over_its_one_link() -> None:
    on, device = cluster(4), gpu("h100-80gb")
    inside, across = (collective(on, device, num_ranks, 1) for num_ranks in (8, 32))
    link, fabric = 50e9 * COLLECTIVE_BANDWIDTH_SHARE, 450e9 * COLLECTIVE_BANDWIDTH_SHARE
    assert inside.exchange_seconds(8e9, 0) == pytest.approx(7e9 / fabric)
    assert across.exchange_seconds(32e9, 0) == pytest.approx(24e9 / link + 7e9 / fabric)
    assert collective(on, device, 1, 1).exchange_seconds(1e9, 1) == 0.0


def test_rows_travel_to_their_experts_and_back_in_each_pass(published: Published) -> None:
    architecture = published("qwen3-30b-a3b")
    once = step(architecture, cluster(1), ep=8)
    again = step(architecture, cluster(1), ep=8, recompute="full")
    exchanges = 4 * 48
    sent = 8 * 4096 * 2048 * 2  # k copies of each token's hidden state in bf16
    group = collective(cluster(1), gpu("h100-80gb"), 8, 1)
    one_micro_batch = group.exchange_seconds(exchanges * sent, exchanges)
    assert once.expert_parallel == pytest.approx(8 * one_micro_batch)
    assert again.expert_parallel == pytest.approx(1.5 * once.expert_parallel)


def test_rows_stay_in_the_node_where_ranks_share_sequences(published: Published) -> None:
    """Experts are spread over the innermost ranks of dp and cp together, so that a node has all."""
    at_once = cluster(2).model_copy(update={"intra_node_latency_microseconds": 1e-6})
    whole, half = (step(published("qwen3-30b-a3b"), at_once, cp=cp, ep=8) for cp in (1, 2))
    assert half.expert_parallel == pytest.approx(whole.expert_parallel / 2)


def test_ranks_with_the_same_experts_reduce_them_over_one_link_a_device(
    published: Published,
) -> None:
    """Each of a node's eight ranks has other experts, which eight links carry at once."""
    slow = cluster(8).model_copy(update={"inter_node_bandwidth_gb_per_second": 0.1})
    whole, spread = (step(published("mixtral-8x7b"), slow, ep=ep).data_parallel for ep in (1, 8))
    assert spread == pytest.approx(whole, rel=0.15)


def test_the_optimizer_steps_over_a_ranks_own_share_of_experts(published: Published) -> None:
    whole, spread = (step(published("mixtral-8x7b"), cluster(4), ep=ep).optimizer for ep in (1, 8))
    assert spread == pytest.approx(whole), "32 shares of all, or 4 shares of an eighth"
