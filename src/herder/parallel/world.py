"""Which rank this process is among how many, read from what started it: torchrun, Slurm or herder.

Owns the order of a plan's axes, a rank's place on them, and the refusals that come before any
process group. Imports no torch: a world that does not fit its plan is refused at once.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from herder.errors import ConfigError, PlanError

AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""From the slowest links to the fastest. dp copies state, fsdp shards it. Experts are spread within
dp, fsdp and cp."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What asks a run to save and end: a person, a scheduler, and the scheduler's warning before that.
Any rank may get one, and all of them then end by it: with 128 plus its number."""
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000
"""Ports of Slurm jobs: below those that Linux hands out (32768 and up)."""
_STEP_STRIDE = 97
"""Keeps the ports of a job's steps apart from those of the next jobs."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One process among those of a job, as torchrun and its like number them."""

    index: int
    count: int
    local_index: int
    """Among those of its node: which device it uses."""


def rank_from_environment(environment: Mapping[str, str]) -> Rank | None:
    """Of RANK, WORLD_SIZE and LOCAL_RANK, or of Slurm's; None: nobody started several processes.

    A Slurm job of one task is a process of its own. Raises ConfigError for what is no number.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        index, local, count = "RANK", "LOCAL_RANK", "WORLD_SIZE"
    elif "SLURM_PROCID" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        index, local, count = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"
    else:
        return None
    rank = _number(environment, index)
    own_place = _number(environment, local) if local in environment else rank
    num_ranks = _number(environment, count)
    if rank >= num_ranks:
        raise ConfigError(f"{index}={rank} and {count}={num_ranks}: ranks count from 0.")
    return Rank(rank, num_ranks, own_place)


def meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """The host and port where ranks meet: MASTER_ADDR and MASTER_PORT, or by the Slurm job.

    There it is the step's first host and a port that follows from the job's id, alike on all nodes.
    Raises ConfigError where neither says it.
    """
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    host = environment.get("MASTER_ADDR") or (first_host(hosts) if hosts else None)
    if host is None:
        raise ConfigError(
            "MASTER_ADDR is not set, so that ranks cannot meet. Start them with torchrun or srun, "
            "or set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there."
        )
    if "MASTER_PORT" in environment:
        return host, _number(environment, "MASTER_PORT")
    if "SLURM_JOB_ID" not in environment:
        raise ConfigError(f"MASTER_PORT is not set; set it to a free port of {host}.")
    step = environment.get("SLURM_STEP_ID", "0")
    key = _number(environment, "SLURM_JOB_ID") + _STEP_STRIDE * int(step if step.isdigit() else 0)
    return host, _FIRST_PORT + key % _NUM_PORTS


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: node003 of `node[003-006,009],other7`."""
    shown = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", node_list)
    return shown.split(",")[0].strip()


def refuse_other_world(mesh_axes: Mapping[str, int], num_ranks: int) -> None:
    """Raise PlanError, before any process group exists, where a plan is for other ranks."""
    needed = 1
    for axis in AXES:
        needed *= mesh_axes[axis]
    if needed != num_ranks:
        degrees = " x ".join(f"{axis} {mesh_axes[axis]}" for axis in AXES if mesh_axes[axis] > 1)
        raise PlanError(
            f"layout: the plan is for {needed} ranks ({degrees or 'one'}), and {num_ranks} were "
            f"started. Start {needed}, or give cluster.nodes and cluster.gpus_per_node so that "
            f"their product is {num_ranks}."
        )


def refuse_several_nodes(nodes: int, gpus_per_node: int, words: Sequence[str]) -> None:
    """Raise PlanError where ranks on other nodes are needed, which no process here can start.

    words: of the command line, for the command that would do.
    """
    if nodes == 1:
        return
    again = shlex.join(words)
    raise PlanError(
        f"cluster.nodes: the plan is for {nodes} nodes of {gpus_per_node} ranks, and this process "
        "can start ranks on its own node only. Under Slurm:\n"
        f"  srun --kill-on-bad-exit --nodes={nodes} --ntasks-per-node={gpus_per_node} {again}\n"
        "or on every node, HOST being one of them:\n"
        f"  torchrun --nnodes={nodes} --nproc-per-node={gpus_per_node} --rdzv-backend=c10d "
        f"--rdzv-endpoint=HOST:29500 --no-python {again}\n"
        "or --set cluster.nodes=1."
    )


def coordinates(rank: int, mesh_axes: Mapping[str, int]) -> str:
    """A rank's place on the axes longer than 1, as `dp 0, tp 3`; empty without any."""
    places, stride = list[str](), 1
    for axis in reversed(AXES):
        size = mesh_axes.get(axis, 1)
        if size > 1:
            places.append(f"{axis} {rank // stride % size}")
        stride *= size
    return ", ".join(reversed(places))


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name].strip()
    if not value.isdigit():
        raise ConfigError(f"{name}={value!r} in the environment is not a number from 0 on.")
    return int(value)
