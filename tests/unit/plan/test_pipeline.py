"""Pipeline schedules in the planner: what they can do, how long ranks wait, what they keep."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from herder.config.architecture import ArchitectureConfig
from herder.config.run import ClusterConfig, LayoutConfig, TrainConfig
from herder.errors import PlanError
from herder.plan.pipeline import (
    Flight,
    Schedule,
    chosen_schedule,
    chunks_per_rank,
    count_problem,
    legal_count,
    waiting_micro_batches,
)
from herder.plan.stages import ModelSizes, even_parts
from herder.plan.training import TrainingPlan, plan_training

Published = Callable[[str], ArchitectureConfig]
TORCH: dict[Schedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def torch_order(schedule: Schedule, ranks: int, times: int) -> dict[int, list[Any]]:
    """What each rank does, in order, as torch has it; None is waiting."""
    chunks = chunks_per_rank(schedule)
    stages = [
        SimpleNamespace(
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            stage_index=ranks * chunk,
            is_last=False,
            submod=None,
        )
        for chunk in range(chunks)
    ]
    made = TORCH[schedule](stages if chunks > 1 else stages[0], times)
    return made.pipeline_order


def kept_by_torch(actions: list[Any], chunks: int) -> float:
    """Most micro-batches of all chunks that are forwarded and whose backward is not done."""
    alive, most = 0, 0
    for action in actions:
        kind = "" if action is None else action.computation_type.value
        alive += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        most = max(most, alive)
    return most / chunks


@pytest.mark.parametrize("schedule", TORCH)
@pytest.mark.parametrize(("ranks", "times"), [(2, 2), (2, 8), (4, 4), (4, 8), (4, 16), (8, 16)])
def test_as_many_micro_batches_are_kept_as_torch_starts(
    schedule: Schedule, ranks: int, times: int
) -> None:
    order = torch_order(schedule, ranks, times)
    for rank, actions in order.items():
        kept = Flight(schedule, ranks, rank, times).kept
        assert kept == kept_by_torch(actions, chunks_per_rank(schedule)), f"rank {rank}"


def test_ranks_wait_as_long_as_the_papers_say() -> None:
    waiting = {schedule: waiting_micro_batches(schedule, 4) for schedule in TORCH}
    assert waiting == {"gpipe": 3, "1f1b": 3, "interleaved_1f1b": 1.5, "zero_bubble": 0.5}


def test_auto_is_1f1b_and_gpipe_where_micro_batches_are_few() -> None:
    assert chosen_schedule("auto", 1, 8) == "none"
    assert chosen_schedule("auto", 4, 4) == "1f1b"
    assert chosen_schedule("auto", 4, 3) == "gpipe"
    assert chosen_schedule("zero_bubble", 4, 3) == "zero_bubble"
    assert chosen_schedule("zero_bubble", 1, 3) == "none"


def test_rounds_of_two_stages_a_rank_are_equal_as_torch_wants_them() -> None:
    for times in range(4, 40):
        is_legal = count_problem("interleaved_1f1b", 4, times) is None
        try:
            torch_order("interleaved_1f1b", 4, times)
        except ValueError:
            assert not is_legal
        else:
            assert is_legal
    assert legal_count("interleaved_1f1b", 2, 5) == 6
    assert legal_count("1f1b", 4, 1) == 4


def plan(
    model: ArchitectureConfig,
    *,
    ranks: int = 4,
    micro_batches: int | None = 8,
    train: dict[str, Any] | None = None,
    **layout: Any,
) -> TrainingPlan:
    tokens = None if micro_batches is None else 512 * micro_batches
    settings = {"micro_batch_size": 1, "global_batch_tokens": tokens, **(train or {})}
    given = LayoutConfig(pipeline_parallel_size=4, **layout)
    cluster = ClusterConfig(nodes=1, gpus_per_node=ranks)
    return plan_training(model, cluster, TrainConfig(**settings), given)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        (
            {"pipeline_schedule": "1f1b", "micro_batches": 3},
            r"=1f1b needs a micro-batch .* 3 for 4 .*global_batch_tokens=2048 or",
        ),
        (
            {"pipeline_schedule": "zero_bubble", "micro_batches": 9},
            r"9 make no 2 equal rounds .*global_batch_tokens=5120 or",
        ),
        (
            {"pipeline_schedule": "zero_bubble", "zero_stage": 2, "ranks": 8, "micro_batches": 16},
            r"zero_stage is 2 .*pipeline_schedule=auto",
        ),
        (
            {"pipeline_schedule": "zero_bubble", "train": {"recompute": "full"}},
            r"train.recompute is full",
        ),
        (
            {"pipeline_schedule": "zero_bubble", "train": {"compile": True}},
            r"train.compile is true",
        ),
    ],
)
def test_what_a_schedule_cannot_do_is_refused_with_what_would_do(
    changed: dict[str, Any], rule: str, published: Published
) -> None:
    with pytest.raises(PlanError, match=f"(?s){rule}"):
        plan(published("smollm2-135m"), **changed)


def test_a_model_that_stages_or_halves_do_not_suit_is_refused(published: Published) -> None:
    routed, smollm = published("qwen1.5-moe-a2.7b"), published("smollm2-135m")
    with pytest.raises(PlanError, match="gradients of experts"):
        plan(routed, pipeline_schedule="zero_bubble")
    few = smollm.model_copy(update={"layers": smollm.layers[:6]})
    with pytest.raises(PlanError, match=r"8 stages \(4 ranks with 2 each\) of 6 layers"):
        plan(few, pipeline_schedule="interleaved_1f1b")
    assert plan(few).layers_per_stage == (1, 2, 2, 1)


def test_a_plan_names_its_schedule_and_the_layers_of_each_stage(published: Published) -> None:
    smollm = published("smollm2-135m")
    plain, interleaved = plan(smollm), plan(smollm, pipeline_schedule="interleaved_1f1b")
    assert (plain.pipeline_schedule, len(plain.layers_per_stage)) == ("1f1b", 4)
    assert (interleaved.pipeline_schedule, len(interleaved.layers_per_stage)) == (
        "interleaved_1f1b",
        8,
    )
    assert sum(interleaved.layers_per_stage) == 30
    bubbles = [each.step_time_seconds.pipeline_bubble for each in (interleaved, plain)]
    assert bubbles[0] < 0.8 * bubbles[1]


def test_without_a_batch_a_schedule_gets_as_many_micro_batches_as_it_needs(
    published: Published,
) -> None:
    for schedule in TORCH:
        made = plan(published("smollm2-135m"), micro_batches=None, pipeline_schedule=schedule)
        assert made.num_micro_batches == 4


def test_the_head_weighs_its_products_and_the_embedding_its_memory(published: Published) -> None:
    sizes = ModelSizes(published("llama-3.1-405b"))
    assert sizes.layers_per_stage(4) == (31, 32, 32, 31)
    # A tied head has no parameters of its own, and is multiplied with all the same.
    qwen = ModelSizes(published("qwen2.5-0.5b"))
    first, *_, last = qwen.layers_per_stage(4)
    assert last < 24 / 4
    assert first < 24 / 4
    # Experts cost what a token meets of them: the dense first layer is no lighter than the rest.
    deepseek = ModelSizes(published("deepseek-v2-lite"))
    assert max(deepseek.layers_per_stage(3)) - min(deepseek.layers_per_stage(3)) <= 3


def heaviest(loads: list[float], counts: tuple[int, ...]) -> float:
    ends = [sum(counts[:part]) for part in range(len(counts) + 1)]
    return max(sum(loads[a:b]) for a, b in pairwise(ends))


def test_parts_are_even() -> None:
    random, num_uneven = Random(0), 0
    for _ in range(200):
        loads = [random.choice([0.1, 1.0, 1.0, 3.0]) for _ in range(random.randint(1, 10))]
        num_parts = random.randint(1, len(loads))
        counts = even_parts(loads, num_parts)
        assert (sum(counts), len(counts), min(counts) > 0) == (len(loads), num_parts, True)
        cuts = combinations(range(1, len(loads)), num_parts - 1)
        options = [tuple(b - a for a, b in pairwise((0, *cut, len(loads)))) for cut in cuts]
        num_uneven += (
            heaviest(loads, counts) > min(heaviest(loads, each) for each in options) + 1e-9
        )
    assert num_uneven <= 2
    assert even_parts([1.0] * 30, 7) == (4, 4, 4, 4, 4, 5, 5)
