"""Whether the memory that a run needs is free on this machine, and which processes hold it if not.

Owns a warning: nothing is refused, since what is held now may be given back. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from herder.config.machine import nvidia_smi, usable_memory_bytes
from herder.units import format_gb

_NUM_NAMED = 4
_CGROUP = Path("/sys/fs/cgroup")

Holder = tuple[str, int, float]
"""(name, process id, bytes)."""


def memory_shortage(rank_bytes: float, *, num_ranks: int, is_on_gpus: bool) -> str | None:
    """A note that names who holds most where less is free than ranks here will need, else None.

    rank_bytes: of one rank, which has a GPU of its own, or shares the machine's memory with all.
    """
    if is_on_gpus:
        told = nvidia_smi("--query-gpu=memory.free").split()
        free = [int(word) * 2**20 for word in told if word.isdigit()]
        if not free or min(free[:num_ranks]) >= rank_bytes:
            return None
        apps = nvidia_smi("--query-compute-apps=process_name,pid,used_memory").splitlines()
        return describe_shortage(
            rank_bytes, min(free[:num_ranks]), parse_gpu_holders(apps), "a GPU"
        )
    needed, free_bytes = rank_bytes * num_ranks, free_memory_bytes()
    if free_bytes >= needed:
        return None
    return describe_shortage(needed, free_bytes, memory_holders(), "this machine")


def describe_shortage(
    needed_bytes: float, free_bytes: float, holders: Sequence[Holder], where: str
) -> str:
    """The note, with the largest holders first."""
    largest = sorted(holders, key=lambda holder: -holder[2])[:_NUM_NAMED]
    named = ", ".join(f"{name} ({pid}) {format_gb(size)}" for name, pid, size in largest)
    told = f"memory: the plan needs {format_gb(needed_bytes)} of {where}, "
    told += f"and {format_gb(free_bytes)} is free now"
    return f"{told}. Most is held by {named}." if named else f"{told}."


def free_memory_bytes() -> float:
    """What can be had without swapping, also under a container's limit."""
    free = float(psutil.virtual_memory().available)
    try:
        used = int((_CGROUP / "memory.current").read_text(encoding="utf-8"))
        stat = (_CGROUP / "memory.stat").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return free
    reclaimable = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
    return min(free, float(usable_memory_bytes() - used + reclaimable))


def memory_holders() -> list[Holder]:
    """All other processes that may be looked at, with their resident memory."""
    found = list[Holder]()
    for process in psutil.process_iter(["name", "memory_info"]):
        memory = process.info["memory_info"]
        if memory is not None and process.pid != os.getpid():
            found.append((process.info["name"], process.pid, float(memory.rss)))
    return found


def parse_gpu_holders(lines: Sequence[str]) -> list[Holder]:
    """Of lines `name, process id, MiB`; lines of another form are passed over."""
    found = list[Holder]()
    for line in lines:
        name, _, rest = line.partition(", ")
        pid, _, mebibytes = rest.partition(", ")
        if pid.isdigit() and mebibytes.isdigit():
            found.append((Path(name).name, int(pid), int(mebibytes) * 2.0**20))
    return found
