from __future__ import annotations

from collections.abc import Callable

import pytest

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention
from herder.config.run import ClusterConfig, TrainConfig
from herder.errors import PlanError
from herder.plan.candidate import Request
from herder.plan.layout import (
    MAX_DATA_PARALLEL_RANKS,
    context_method,
    divisors,
    fast_domain_size,
    growing_clusters,
    legal_expert_degrees,
    legal_tensor_degrees,
    make_layout,
    tensor_degree_problem,
)
from herder.plan.search import all_layouts, layouts_by_simplicity
from herder.plan.stages import ModelSizes

Published = Callable[[str], ArchitectureConfig]


@pytest.mark.parametrize(
    ("name", "tp", "cp", "method"),
    [
        ("llama-3.1-405b", 8, 4, "ulysses"),  # 16 heads a rank, and one of keys and values
        ("llama-3.1-405b", 8, 32, "ring"),
        ("qwen2.5-0.5b", 1, 7, "ring"),  # 14 heads, but 2 of keys and values
        ("qwen2.5-0.5b", 1, 2, "ulysses"),
        ("deepseek-v3", 8, 16, "ulysses"),  # keys and values of every head
    ],
)
def test_ranks_exchange_heads_where_each_gets_as_many(
    published: Published, name: str, tp: int, cp: int, method: str
) -> None:
    architecture = published(name)
    layout = make_layout(tp=tp, pp=1, dp=1, cp=cp, ep=1, zero_stage=1)
    assert context_method(architecture, layout, "auto") == method
    assert context_method(architecture, layout, "ring") == "ring"
    if method == "ring":
        with pytest.raises(PlanError, match=f"each of context_parallel_size={cp} ranks"):
            context_method(architecture, layout, "ulysses")


def request(architecture: ArchitectureConfig, cluster: ClusterConfig, length: int) -> Request:
    return Request(ModelSizes(architecture), cluster, TrainConfig(sequence_length=length))


@pytest.mark.parametrize(
    ("name", "nodes", "gpu", "training", "serving"),
    [
        ("llama-2-7b", 1, "h100-80gb", (1, 2, 4, 8), (1, 2, 4, 8)),
        ("llama-3.1-405b", 1, "h100-80gb", (1, 2, 4, 8), (1, 2, 4, 8)),
        ("qwen2.5-7b", 1, "h100-80gb", (1, 2, 4), (1, 2, 4)),
        ("qwen2.5-0.5b", 1, "h100-80gb", (1, 2), (1, 2)),
        ("smollm2-135m", 1, "h100-80gb", (1,), (1,)),
        # A rack of 72 is one fast domain; training copies the 8 key-value heads to go beyond 8.
        ("llama-3.1-405b", 18, "gb200", (1, 2, 4, 8), (1, 2, 4, 8)),
    ],
)
def test_legal_tensor_parallel_degrees(
    name: str,
    nodes: int,
    gpu: str,
    training: tuple[int, ...],
    serving: tuple[int, ...],
    published: Published,
) -> None:
    cluster = ClusterConfig(nodes=nodes, gpus_per_node=4 if gpu == "gb200" else 8, gpu=gpu)
    architecture = published(name)
    assert legal_tensor_degrees(architecture, cluster) == training
    assert legal_tensor_degrees(architecture, cluster, copies_kv_heads=False) == serving


def test_training_may_go_beyond_the_key_value_heads_and_serving_may_not(
    published: Published,
) -> None:
    wide = ClusterConfig(nodes=1, gpus_per_node=16, gpu="h100-80gb")
    assert legal_tensor_degrees(published("llama-3-8b"), wide)[-1] == 16
    assert legal_tensor_degrees(published("llama-3-8b"), wide, copies_kv_heads=False)[-1] == 8


def test_without_a_rack_fabric_tensor_parallelism_stays_in_the_node() -> None:
    assert fast_domain_size(ClusterConfig(nodes=4, gpus_per_node=8, gpu="h100-80gb")) == 8
    assert fast_domain_size(ClusterConfig(nodes=18, gpus_per_node=4, gpu="gb200")) == 72
    assert fast_domain_size(ClusterConfig(nodes=2, gpus_per_node=4, gpu="gb200")) == 8


def test_expert_degrees_divide_experts_and_ranks(published: Published) -> None:
    assert legal_expert_degrees(published("qwen1.5-moe-a2.7b"), 8) == (1, 2, 4)
    assert legal_expert_degrees(published("llama-2-7b"), 8) == (1,)


def test_divisors_come_in_order() -> None:
    assert divisors(72) == (1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36, 72)


def test_simplicity_is_tp_1_then_the_largest_then_stages(published: Published) -> None:
    cluster = ClusterConfig(nodes=4, gpus_per_node=8)
    layouts = layouts_by_simplicity(request(published("llama-3-8b"), cluster, 4096))
    degrees = [(x.tensor_parallel_size, x.pipeline_parallel_size) for x in layouts]
    assert list(dict.fromkeys(degrees)) == [(1, 1), (8, 1), (8, 2), (8, 4)]


def test_zero_stages_rise_at_each_step(published: Published) -> None:
    cluster = ClusterConfig(nodes=1, gpus_per_node=8)
    layouts = list(layouts_by_simplicity(request(published("llama-3-8b"), cluster, 4096)))
    assert [x.zero_stage for x in layouts] == [1, 2, 3, 0]


def test_experts_are_spread_over_fast_links_then_all_of_them_and_gathered_last(
    published: Published,
) -> None:
    cluster = ClusterConfig(nodes=4, gpus_per_node=8)
    layouts = list(layouts_by_simplicity(request(published("mixtral-8x22b"), cluster, 4096)))
    order = [(x.zero_stage, x.expert_parallel_size) for x in layouts if x.num_shards == 32]
    assert order == [(stage, ep) for stage in (1, 2, 3) for ep in (1, 2, 4, 8)]
    wide = list(layouts_by_simplicity(request(published("olmoe"), cluster, 4096)))
    order = [(x.zero_stage, x.expert_parallel_size) for x in wide if x.num_shards == 32]
    near, far = [1, 2, 4, 8], [16, 32]
    assert order == [
        *((stage, ep) for degrees in (near, far) for stage in (1, 2) for ep in degrees),
        *((3, ep) for ep in near + far),
    ]


def test_context_parallelism_is_for_long_sequences_only(published: Published) -> None:
    cluster = ClusterConfig(nodes=1, gpus_per_node=8)
    llama = published("llama-3-8b")
    for length, largest in ((4096, 1), (8192, 2), (131_072, 8)):
        degrees = {
            layout.context_parallel_size
            for layout in layouts_by_simplicity(request(llama, cluster, length))
        }
        assert max(degrees) == largest


def test_every_layout_fills_the_cluster_within_the_cap(published: Published) -> None:
    cluster = ClusterConfig(nodes=256, gpus_per_node=8)
    layouts = list(all_layouts(request(published("qwen3-30b-a3b"), cluster, 8192)))
    assert len(layouts) == len(set(layouts)) > 100
    assert {x.num_ranks for x in layouts} == {2048}
    assert max(x.num_shards for x in layouts) <= MAX_DATA_PARALLEL_RANKS


def test_mesh_axes_multiply_to_the_ranks() -> None:
    for stage in (0, 1, 2, 3):
        layout = make_layout(tp=2, pp=3, dp=4, cp=2, ep=2, zero_stage=stage)
        axes = dict(layout.mesh_axes)
        assert axes.pop("ep") == 2, "experts reuse data-parallel ranks"
        product = 1
        for size in axes.values():
            product *= size
        assert product == layout.num_ranks == 48
        assert axes["fsdp"] == (4 if stage else 1)


def test_a_layout_is_told_by_its_degrees_above_one() -> None:
    one = make_layout(tp=1, pp=1, dp=1, cp=1, ep=1, zero_stage=0)
    many = make_layout(tp=8, pp=4, dp=1024, cp=1, ep=1, zero_stage=1)
    assert one.told() == "one rank"
    assert many.told() == "TP 8, PP 4, DP 1,024, ZeRO-1"


def test_clusters_grow_from_parts_of_a_node() -> None:
    asked = ClusterConfig(nodes=3, gpus_per_node=8)
    sizes = [(c.nodes, c.gpus_per_node) for c in growing_clusters(asked, 1.5)]
    assert sizes[:5] == [(1, 2), (1, 4), (1, 8), (2, 8), (3, 8)]
    large = next(growing_clusters(asked, 100.0))
    assert large.num_gpus == 104


def test_copies_of_the_sharded_state_are_an_axis_of_the_mesh() -> None:
    layout = make_layout(tp=2, pp=1, dp=8, cp=1, ep=1, zero_stage=2, copies=2)
    assert (layout.mesh_axes["dp"], layout.mesh_axes["fsdp"]) == (2, 4)
    assert (layout.num_ranks, layout.num_data_ranks, layout.num_shards) == (16, 8, 4)
    assert layout.told() == "TP 2, DP 8, ZeRO-2 in 2 copies"


def test_heads_that_are_normed_as_one_are_not_copied(published: Published) -> None:
    plain = published("olmoe")
    assert isinstance(plain.attention, GroupedQueryAttention)
    few = plain.attention.model_copy(update={"num_key_value_heads": 2})
    assert few.qk_norm == "projection"
    grouped = plain.model_copy(update={"attention": few})
    problem = tensor_degree_problem(grouped, 4, copies_kv_heads=True)
    assert problem == "exceeds num_key_value_heads=2, which are normed as one and not copied"
    assert tensor_degree_problem(grouped, 2, copies_kv_heads=True) is None
