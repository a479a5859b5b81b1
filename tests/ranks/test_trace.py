"""Collectives traced on ranks: none is missed, nothing is changed, and whoever stops is named."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from herder.config.architecture import ArchitectureConfig
from herder.config.run import LayoutConfig
from herder.errors import RankError
from herder.observe.hangs import Diagnosis, diagnose_hang
from herder.observe.trace import read_traces
from herder.parallel.failures import told_failures
from herder.parallel.mesh import Rank, build_mesh
from herder.parallel.ranks import run_on_ranks
from herder.parallel.seat import note
from herder.parallel.trace import traced_collectives
from herder.plan.training import TrainingPlan
from tests.tiny import micro_batches, plan_on_cpus, planned_trainer, tiny_model

TOKENS = 32
AXES = {"pp": 1, "dp": 2, "fsdp": 1, "cp": 1, "tp": 1}
TIMEOUT_SECONDS = 6.0


@dataclass(frozen=True)
class Case:
    """A layout, and the collectives and axes that its trace must have among others."""

    num_ranks: int
    layout: dict[str, Any]
    expected: set[tuple[str, str]]
    kinds: str = "dd"
    backend: str | None = None


CASES = {
    "copies of stages": Case(
        4,
        {"pipeline_parallel_size": 2, "zero_stage": 0},
        {("send", "pp"), ("recv", "pp"), ("all_reduce", "dp"), ("all_reduce", "world")},
    ),
    "tensor and shards": Case(
        4,
        {"tensor_parallel_size": 2, "zero_stage": 3},
        {("all_gather_single", "fsdp"), ("reduce_scatter_single", "fsdp"), ("all_reduce", "tp")},
    ),
    "tensor, compiled": Case(
        2,
        {"tensor_parallel_size": 2},
        {("all_gather_single", "tp"), ("reduce_scatter_single", "tp")},
        backend="aot_eager",
    ),
    "ring": Case(
        2,
        {"context_parallel_size": 2, "context_method": "ring"},
        {("send", "cp"), ("recv", "cp")},
    ),
    "experts": Case(
        4,
        {"expert_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 0},
        {("all_to_all_single", "ep"), ("all_reduce", "dp")},
        kinds="dm",
    ),
}


def counted_by_torch() -> Counter[str]:
    """What each group of this rank counts itself, by the name that traces give it."""
    counts = Counter[str]()
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_rank(group) >= 0:
            name = f"{group.group_name}:{dist.get_process_group_ranks(group)[0]}"
            counts[name] = group._get_sequence_number_for_group()
    return counts


def losses(model: ArchitectureConfig, plan: TrainingPlan, *, compiled: bool) -> list[float]:
    run = planned_trainer(model, plan, compiled=compiled)
    return [run.step(micro_batches(step, 4, TOKENS)).loss for step in range(2)]


def traced_and_not(
    model: ArchitectureConfig, plan: TrainingPlan, folder: Path, backend: str | None
) -> tuple[list[float], list[float], Counter[str]]:
    """(losses without a trace, losses with one, what torch counted during the latter)."""
    torch.compiler.set_default_backend(backend)
    plain = losses(model, plan, compiled=backend is not None)
    rank, before = Rank(dist.get_rank(), dist.get_world_size(), 0), counted_by_torch()
    with traced_collectives(folder, rank, plan.mesh_axes):
        traced = losses(model, plan, compiled=backend is not None)
    counted = counted_by_torch() - before
    dist.barrier()  # no longer traced
    return plain, traced, counted


@pytest.mark.parametrize("name", CASES)
def test_every_collective_that_torch_counts_is_traced(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = tiny_model(case.kinds)
    train = {"sequence_length": TOKENS, "global_batch_tokens": 4 * TOKENS}
    plan = plan_on_cpus(model, case.num_ranks, LayoutConfig(**case.layout), **train)
    told = run_on_ranks(traced_and_not, case.num_ranks, model, plan, tmp_path, case.backend)
    traces = read_traces(tmp_path)
    for rank, (plain, traced, counted) in enumerate(told):
        assert traced == plain
        assert Counter(call.group for call in traces[rank].calls) == counted
        assert {(call.name, call.axis) for call in traces[rank].calls} >= case.expected
    cut_off = {rank: replace(trace, ending=None) for rank, trace in traces.items()}
    assert diagnose_hang(cut_off).cause == "none", "all have entered the same"


def fail_in_step_two(folder: Path, fault: str) -> None:
    """The second rank stops before the second sum."""
    rank = Rank(dist.get_rank(), 2, 0)
    with traced_collectives(folder, rank, AXES), told_failures():
        for step in (1, 2):
            note(step, "forward and backward")
            if step == 2 and rank.index == 1:
                if fault == "raises":
                    raise ValueError("boom")
                ctypes.PyDLL(None).sleep(600)  # no other thread of this process runs meanwhile
            dist.all_reduce(torch.ones(5))


def found(folder: Path, fault: str) -> Diagnosis:
    with pytest.raises(RankError):
        run_on_ranks(fail_in_step_two, 2, folder, fault, timeout_seconds=TIMEOUT_SECONDS)
    return diagnose_hang(read_traces(folder))


def test_a_rank_that_holds_the_interpreters_lock_is_named(tmp_path: Path) -> None:
    diagnosis = found(tmp_path, "holds the lock")
    assert (diagnosis.cause, diagnosis.ranks) == ("silent", [1])
    assert diagnosis.verdict == (
        "rank 1 (dp 1) is hung or gone without a word, in step 2, forward and backward: "
        "rank 0 waits in all_reduce [5], number 2 on axis dp, step 2."
    )


def test_a_rank_that_raises_is_named_by_its_error(tmp_path: Path) -> None:
    diagnosis = found(tmp_path, "raises")
    assert (diagnosis.cause, diagnosis.ranks) == ("error", [1])
    assert diagnosis.verdict == "rank 1 (dp 1) ended by itself: ValueError: boom"


def seconds_of_groups(_: None) -> set[float]:
    """The time-outs of all groups of this rank."""
    mesh = build_mesh({**AXES, "tp": 2}, "cpu")
    mesh["dp", "tp"]._flatten()
    groups = [group for group in dist.distributed_c10d._world.pg_map if dist.get_rank(group) >= 0]
    assert len(groups) > 3
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_groups_of_a_mesh_have_the_time_out_that_was_asked_for() -> None:
    assert run_on_ranks(seconds_of_groups, 4, None, timeout_seconds=17.0) == [{17.0}] * 4
