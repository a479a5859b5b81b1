"""Which rank a process is, by what started it; where ranks meet; what is refused before they do."""

from __future__ import annotations

import pytest

from herder.errors import ConfigError, PlanError
from herder.parallel.world import (
    Rank,
    coordinates,
    first_host,
    meeting_point,
    rank_from_environment,
    refuse_other_world,
    refuse_several_nodes,
)

SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "node[003-006,009]",
}


def test_without_a_launcher_there_is_no_rank() -> None:
    assert rank_from_environment({"PATH": "/bin"}) is None


def test_torchrun_numbers_its_processes() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert rank_from_environment(environment) == Rank(5, 8, 1)


def test_slurm_numbers_its_tasks_and_torchrun_inside_slurm_wins() -> None:
    assert rank_from_environment(SLURM) == Rank(9, 16, 1)
    inside = {**SLURM, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert rank_from_environment(inside) == Rank(0, 2, 0)


def test_a_slurm_job_of_one_task_is_a_process_of_its_own() -> None:
    assert rank_from_environment({**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize("given", [{"RANK": "one"}, {"RANK": "8"}, {"WORLD_SIZE": "-1"}])
def test_numbers_that_cannot_be_are_refused_by_name(given: dict[str, str]) -> None:
    name = next(iter(given))
    with pytest.raises(ConfigError, match=f"{name}=.*{given[name]}"):
        rank_from_environment({"RANK": "0", "WORLD_SIZE": "8", **given})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node003", "node003"),
        ("node[003-006,009]", "node003"),
        ("node[9,11-12],other[1-2]", "node9"),
        ("gpu-a,gpu-b", "gpu-a"),
        ("rack[2-3]node[07-10]", "rack2node07"),
        ("n[01-02]-ib.cluster", "n01-ib.cluster"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_slurm_ranks_meet_at_the_first_host_and_a_port_of_the_job() -> None:
    host, port = meeting_point(SLURM)
    assert host == "node003"
    assert 15_000 <= port < 30_000
    assert meeting_point({**SLURM, "SLURM_PROCID": "0"}) == (host, port)
    assert meeting_point({**SLURM, "SLURM_JOB_ID": "123457"}) != (host, port)
    assert meeting_point({**SLURM, "SLURM_STEP_ID": "1"}) != (host, port)
    given = {**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    assert meeting_point(given) == ("head", 29500)


def test_a_missing_meeting_point_is_told() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        meeting_point({})
    with pytest.raises(ConfigError, match="MASTER_PORT is not set"):
        meeting_point({"MASTER_ADDR": "head"})


AXES = {"pp": 2, "dp": 1, "fsdp": 3, "cp": 1, "ep": 1, "tp": 4}


def test_coordinates_count_along_the_fastest_axis_first() -> None:
    assert coordinates(0, AXES) == "pp 0, fsdp 0, tp 0"
    assert coordinates(3, AXES) == "pp 0, fsdp 0, tp 3"
    assert coordinates(4, AXES) == "pp 0, fsdp 1, tp 0"
    assert coordinates(23, AXES) == "pp 1, fsdp 2, tp 3"
    assert coordinates(0, {}) == ""


def test_another_world_is_refused_with_both_numbers() -> None:
    refuse_other_world(AXES, 24)
    with pytest.raises(PlanError, match=r"for 24 ranks \(pp 2 x fsdp 3 x tp 4\), and 8 were"):
        refuse_other_world(AXES, 8)


def test_several_nodes_need_someone_to_start_ranks_there() -> None:
    refuse_several_nodes(1, 8, ["herder", "train", "r.yaml"])
    with pytest.raises(PlanError) as caught:
        refuse_several_nodes(2, 8, ["herder", "train", "my recipe.yaml"])
    assert (
        "srun --kill-on-bad-exit --nodes=2 --ntasks-per-node=8 herder train 'my recipe.yaml'"
        in str(caught.value)
    )
    assert "torchrun --nnodes=2 --nproc-per-node=8" in str(caught.value)
