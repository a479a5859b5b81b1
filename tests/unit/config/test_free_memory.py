"""Memory that a run needs and others hold: who is named, and when nothing is said."""

from __future__ import annotations

import subprocess

from herder.config.free_memory import (
    describe_shortage,
    free_memory_bytes,
    memory_holders,
    memory_shortage,
    parse_gpu_holders,
)
from herder.units import format_gb


def test_nothing_is_said_where_enough_is_free() -> None:
    assert memory_shortage(1.0, num_ranks=2, is_on_gpus=False) is None


def test_a_shortage_names_processes_that_hold_memory() -> None:
    each = free_memory_bytes()  # of two ranks: twice what is free
    told = memory_shortage(each, num_ranks=2, is_on_gpus=False)
    assert told is not None
    assert told.startswith(f"memory: the plan needs {format_gb(2 * each)} of this machine, and ")
    assert "Most is held by " in told


def test_another_process_is_among_the_holders() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        held = {pid: (name, size) for name, pid, size in memory_holders()}
        process.kill()
    assert held[process.pid][0] == "sleep"
    assert held[process.pid][1] > 0


def test_the_largest_holders_come_first() -> None:
    holders = [("a", 1, 1e9), ("b", 2, 5e9), ("c", 3, 2e9), ("d", 4, 3e9), ("e", 5, 4e9)]
    told = describe_shortage(8e9, 2e9, holders, "this machine")
    assert told == (
        "memory: the plan needs 8.00 GB of this machine, and 2.00 GB is free now. "
        "Most is held by b (2) 5.00 GB, e (5) 4.00 GB, d (4) 3.00 GB, c (3) 2.00 GB."
    )


def test_processes_on_a_gpu_are_read_from_what_nvidia_smi_prints() -> None:
    lines = ["/usr/bin/python3, 4242, 70000", "[Not Found], 17, [N/A]"]
    assert parse_gpu_holders(lines) == [("python3", 4242, 70000 * 2.0**20)]
