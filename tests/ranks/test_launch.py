"""Ranks under the launcher: how they end, what is told, and that no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

RANKS = 3
TIMEOUT_SECONDS = 8
"""Short for the test of a rank that hangs; ranks must join within it on a busy machine."""
WAIT_SECONDS = 60

LAUNCHER = f"""
import sys
from herder.errors import HerderError
from herder.parallel.launch import Job, launch
from herder.train.interrupt import StopRequest

job = Job(
    command=[sys.executable, *sys.argv[1:]],
    num_ranks={RANKS},
    mesh_axes={{"pp": 1, "dp": {RANKS}, "fsdp": 1, "cp": 1, "tp": 1}},
    timeout_seconds={TIMEOUT_SECONDS},
)
with StopRequest() as stop:
    try:
        sys.exit(launch(job, stop))
    except HerderError as error:
        print(f"herder: {{error}}", file=sys.stderr)
        sys.exit(error.exit_status)
"""

RANK = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
from herder.errors import DataError
from herder.parallel.seat import note, seated
from herder.parallel.world import rank_from_environment
from herder.train.interrupt import StopRequest

fault, folder = sys.argv[1], Path(sys.argv[2])
rank = rank_from_environment(os.environ)
stop = StopRequest(tells=False)
with stop, seated(rank):
    child = subprocess.Popen(["sleep", "600"])
    (folder / f"{{rank.index}}").write_text(f"{{os.getpid()}} {{child.pid}}")
    (folder / "started").open("a").write("x")
    if fault == "user":
        raise DataError("data.source: no such file.")
    if fault == "user of rank 1" and rank.index == 1:
        raise DataError("data.source: no such file.")
    while fault in ("waits", "deaf"):
        time.sleep(0.05)
        if stop.signal and fault == "waits":
            time.sleep(0.5)  # for a signal that comes twice
            (folder / f"saved-{{rank.index}}").write_text(str(stop.num_asked))
            sys.exit(stop.exit_status)
    import torch
    import torch.distributed as dist
    from herder.parallel.mesh import build_mesh, joined
    print(f"{{torch.get_num_threads()}} threads, rank {{rank.index}}")
    print("the same warning", file=sys.stderr)
    with joined(rank, torch.device("cpu"), timeout_seconds={TIMEOUT_SECONDS}):
        mesh = build_mesh(dict(pp=1, dp={RANKS}, fsdp=1, cp=1, tp=1), "cpu")
        x = torch.ones(1000)
        for step in range(1, 4):
            note(step, "forward and backward")
            if step == 3 and rank.index == 1:
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "raises":
                    raise ValueError("boom")
                if fault == "hangs":
                    time.sleep(600)
            note(step, "gradient reduction")
            dist.all_reduce(x, async_op=True).wait()
"""


@dataclass
class Launch:
    """One launcher with its ranks, in a folder where they say who they are."""

    folder: Path
    process: subprocess.Popen[str] = field(init=False)

    def start(self, fault: str) -> None:
        (self.folder / "launcher.py").write_text(LAUNCHER)
        (self.folder / "rank.py").write_text(textwrap.dedent(RANK))
        words = ["launcher.py", "rank.py", fault, str(self.folder)]
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str, str]:
        """(status, stdout, stderr) of the launcher, once it has ended."""
        out, err = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, out, err

    def run(self, fault: str) -> tuple[int, str, str]:
        self.start(fault)
        return self.finish()

    def start_and_wait(self, fault: str) -> None:
        """Start, and return when all ranks listen to signals."""
        self.start(fault)
        started, until = self.folder / "started", time.monotonic() + WAIT_SECONDS
        while not started.exists() or len(started.read_text()) < RANKS:
            assert self.process.poll() is None, self.finish()
            assert time.monotonic() < until, "ranks did not start"
            time.sleep(0.05)

    def left(self) -> list[int]:
        """Processes of ranks, and what they started, that are still there."""
        files = [path for path in self.folder.iterdir() if path.name.isdigit()]
        pids = [int(word) for path in files for word in path.read_text().split()]
        return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """Whether there is such a process; a zombie that its adopter has not collected is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.process.kill()
    for pid in launch.left():
        os.kill(pid, signal.SIGKILL)
    launch.process.communicate()


def test_ranks_that_end_well_leave_one_log(job: Launch) -> None:
    status, out, err = job.run("none")
    assert (status, job.left()) == (0, [])
    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
    assert out == f"{threads} threads, rank 0\n"
    assert f"[rank 2] {threads} threads, rank 2\n" in err
    assert err.count("the same warning") == 2, "of rank 0, and once of the others"


def test_an_exception_in_one_rank_ends_all_and_is_named(job: Launch) -> None:
    status, _, err = job.run("raises")
    assert (status, job.left()) == (1, [])
    assert "[rank 1] ValueError: boom" in err, "the traceback is passed on"
    assert err.count("herder: ") == 1
    assert "herder: rank 1: dp 1: ValueError: boom, in step 3, forward and backward." in err
    assert "  ranks 0, 2: step 3, gradient reduction, waiting in all_reduce\n" in err
    assert "Connection closed" not in err, "consequences are not told beside the cause"


def test_a_killed_rank_ends_all_and_is_named(job: Launch) -> None:
    status, _, err = job.run("killed")
    assert (status, job.left()) == (1, [])
    assert err.count("herder: ") == 1
    assert "herder: rank 1: dp 1: killed by SIGKILL" in err
    assert "in step 3, forward and backward." in err
    assert "  ranks 0, 2: step 3, gradient reduction, waiting in all_reduce\n" in err


def test_a_rank_that_hangs_is_named_after_the_time_out(job: Launch) -> None:
    status, _, err = job.run("hangs")
    assert (status, job.left()) == (1, [])
    assert err.count("herder: ") == 1
    assert "herder: rank 1: dp 1: did not come to meet the others in all_reduce" in err
    assert f"train.collective_timeout_seconds={TIMEOUT_SECONDS}" in err
    assert "s ago in step 3, forward and backward." in err


def test_a_signal_reaches_every_rank_once_and_they_save(job: Launch) -> None:
    job.start_and_wait("waits")
    os.killpg(job.process.pid, signal.SIGTERM)
    status, _, err = job.finish()
    assert (status, job.left()) == (143, [])
    assert [(job.folder / f"saved-{rank}").read_text() for rank in range(RANKS)] == ["1"] * RANKS
    assert err.count("herder: ") == err.count("SIGTERM: finishing this step, then saving") == 1


def test_the_third_signal_leaves_no_rank_that_does_not_listen(job: Launch) -> None:
    job.start_and_wait("deaf")
    for _ in range(3):
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    status, _, _ = job.finish()
    assert status == 130
    assert_none_left_soon(job)


def test_ranks_do_not_outlive_a_launcher_that_is_killed(job: Launch) -> None:
    job.start_and_wait("waits")
    assert len(job.left()) == 2 * RANKS, "each has started a process of its own"
    job.process.kill()
    assert job.process.wait() == -signal.SIGKILL
    assert_none_left_soon(job)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("user", "herder: data.source: no such file.\n"),
        ("user of rank 1", "herder: rank 1 (dp 1): data.source: no such file.\n"),
    ],
)
def test_a_users_mistake_is_told_once(job: Launch, fault: str, told: str) -> None:
    status, _, err = job.run(fault)
    assert (status, job.left()) == (2, [])
    assert err.count("herder: ") == 1
    assert told in err


def test_ranks_that_slurm_started_ask_each_other_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    task = {"SLURM_NTASKS": "3", "SLURM_JOB_ID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **task, "SLURM_JOB_NODELIST": "127.0.0.1"}
    ranks = list[subprocess.Popen[bytes]]()
    for rank in range(RANKS):
        with (tmp_path / f"stderr-{rank}").open("w") as log:
            place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            words = [sys.executable, "rank.py", "hangs", str(tmp_path)]
            every = {"cwd": tmp_path, "stderr": log, "start_new_session": True}
            ranks.append(subprocess.Popen(words, env={**environment, **place}, **every))
    try:
        for index in (0, 2):
            ranks[index].wait(WAIT_SECONDS)
    finally:
        for process in ranks:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    told = [(tmp_path / f"stderr-{rank}").read_text() for rank in (0, 2)]
    assert (ranks[0].returncode, ranks[2].returncode) == (1, 1)
    assert "RankError: rank 1: dp 1: did not come to meet the others in all_reduce" in told[0]
    assert "s ago in step 3, forward and backward." in told[0]
    assert "RankError: rank 2: dp 2: step 3, gradient reduction: ended with the others" in told[1]


def assert_none_left_soon(job: Launch) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while job.left() and time.monotonic() < until:
        time.sleep(0.05)
    assert job.left() == []
