"""Several ranks of one command on this machine: their start, their one log, their common end.

The launcher imports no torch and computes nothing. It holds what the ranks share: the socket where
they meet, the board of what each is doing, and a pipe whose closing tells them that it is gone.
Whatever happens, no rank and nothing a rank started is left when `launch` returns.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from herder.config.catalog import cluster_gpu
from herder.config.free_memory import memory_shortage
from herder.config.machine import usable_cores
from herder.parallel.board import Board
from herder.parallel.diagnosis import RankState, diagnose, is_cause_gone
from herder.parallel.relay import Relay
from herder.parallel.seat import INHERITED
from herder.parallel.world import STOP_SIGNALS, refuse_several_nodes
from herder.plan.training import TrainingPlan
from herder.units import GB

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 3.0
"""How long the cause is waited for once a rank has failed, and the others' own words once the cause
has ended. Peers of a rank that is late or gone fail within milliseconds of each other."""
_GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL for ranks that are no longer wanted."""
_RECORDED_COLLECTIVES = "2000"
"""torch's own default under nccl. Each rank keeps them in memory, gloo only if it is told to."""


class Asked(Protocol):
    """Who hears this process' signals: which came first, and how many."""

    signal: signal.Signals | None
    num_asked: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command on several ranks."""

    command: Sequence[str]
    num_ranks: int
    mesh_axes: Mapping[str, int]
    """For coordinates in messages."""
    timeout_seconds: float
    """Of a collective, for messages."""
    devices: Sequence[int] = ()
    """Which one each rank uses; empty: as the ranks are numbered."""


def job_of_plan(
    plan: TrainingPlan, words: Sequence[str], timeout_seconds: float, devices: Sequence[int] = ()
) -> Job:
    """The job that runs `herder WORDS` on the plan's ranks.

    Raises PlanError for a plan of several nodes.
    """
    refuse_several_nodes(plan.cluster.nodes, plan.cluster.gpus_per_node, ["herder", *words])
    this_program = [sys.executable, "-P", "-c", "from herder.cli.main import main; main()"]
    return Job(
        command=[*this_program, *words],
        num_ranks=plan.layout.num_ranks,
        mesh_axes=plan.mesh_axes,
        timeout_seconds=timeout_seconds,
        devices=devices,
    )


def shortage_of_plan(plan: TrainingPlan) -> str:
    """A line that says who holds the memory which the plan's ranks here will need, or empty."""
    told = memory_shortage(
        plan.memory_gb.total * GB,
        num_ranks=min(plan.layout.num_ranks, plan.cluster.gpus_per_node),
        is_on_gpus=cluster_gpu(plan.cluster).kind == "gpu",
    )
    return f"  {told}\n" if told else ""


def launch(job: Job, asked: Asked) -> int:
    """Run the job's ranks to their end; 0, or 128 plus the signal that they were asked to stop by.

    Each signal that this process hears is passed on to every rank once; one that a rank got from
    elsewhere stops all of them too. Raises RankError naming the
    rank that died, hung or failed, UserError or TrainingError with what ranks said themselves.
    """
    with ExitStack() as stack:
        board = Board.create(job.num_ranks)
        stack.callback(board.close)
        relay = Relay(sys.stderr)
        stack.callback(relay.close)
        ranks = _Ranks(job, board)
        stack.callback(ranks.end)
        ranks.start(relay)
        states = _watch(ranks, relay, asked)
        if all(status == 0 for status in ranks.statuses()):
            return 0
        stopped_by = asked.signal or ranks.signal_they_agreed_on()
        if stopped_by is not None and ranks.were_stopped_by(stopped_by):
            return 128 + stopped_by
        now = time.time()
        raise diagnose(states, job.mesh_axes, timeout_seconds=job.timeout_seconds, unix_seconds=now)


class _Ranks:
    """The processes. Each is the head of a session: a terminal's Ctrl-C reaches the launcher only,
    and what a rank starts can be ended with it.
    """

    def __init__(self, job: Job, board: Board) -> None:
        self.job = job
        self._board = board
        self._processes = list[subprocess.Popen[bytes]]()
        self._lifeline: int | None = None

    def start(self, relay: Relay) -> None:
        """Start all of them, on a port that this process listens on until rank 0 does."""
        kept, self._lifeline = os.pipe()
        try:
            with socket.create_server((_HOST, 0), backlog=self.job.num_ranks) as meeting:
                for index in range(self.job.num_ranks):
                    self._processes.append(self._start_one(index, kept, meeting, relay))
        finally:
            os.close(kept)

    def _start_one(
        self, index: int, lifeline: int, meeting: socket.socket, relay: Relay
    ) -> subprocess.Popen[bytes]:
        is_first = index == 0
        inherited = [self._board.descriptor, lifeline, *([meeting.fileno()] if is_first else [])]
        process = subprocess.Popen(
            self.job.command,
            env=self._environment(index, meeting.getsockname()[1], inherited),
            stdin=subprocess.DEVNULL,
            stdout=None if is_first else subprocess.PIPE,
            stderr=None if is_first else subprocess.STDOUT,
            pass_fds=inherited,
            start_new_session=True,
        )
        if process.stdout is not None:
            relay.add(index, os.dup(process.stdout.fileno()))
            process.stdout.close()
        return process

    def _environment(self, index: int, port: int, inherited: Sequence[int]) -> dict[str, str]:
        count = str(self.job.num_ranks)
        threads = max(1, usable_cores() // self.job.num_ranks)
        defaults = {
            "OMP_NUM_THREADS": str(threads),
            "TORCH_FR_BUFFER_SIZE": _RECORDED_COLLECTIVES,
        }
        descriptors = [*inherited, -1][:3]
        return {
            **defaults,
            **os.environ,
            "RANK": str(index),
            "LOCAL_RANK": str(self.job.devices[index] if self.job.devices else index),
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(port),
            INHERITED: ",".join(map(str, descriptors)),
        }

    def send(self, number: signal.Signals) -> None:
        """Pass a signal on to all that are still there."""
        for process in self._processes:
            process.send_signal(number)

    def statuses(self) -> list[int | None]:
        """Exit statuses as Popen has them, None for those still there."""
        return [process.poll() for process in self._processes]

    def were_stopped_by(self, number: signal.Signals) -> bool:
        """Whether that is why they ended. One that did not listen yet takes the others with it."""
        return -number in self.statuses() or not self.has_failed()

    def signal_they_agreed_on(self) -> signal.Signals | None:
        """The one that they say they were stopped by."""
        return next((by for by in STOP_SIGNALS if 128 + by in self.statuses()), None)

    def states(self) -> list[RankState]:
        """What is known of each rank now."""
        return [
            RankState(
                index=index,
                ended=None if status is None else _how_it_ended(status),
                is_aborted=status == -signal.SIGABRT,
                note=self._board.last_note(index),
                report=self._board.last_report(index),
            )
            for index, status in enumerate(self.statuses())
        ]

    def has_failed(self) -> bool:
        """Whether a rank failed, as its status or its report says."""
        fine = (None, 0, *(128 + number for number in STOP_SIGNALS))
        reports = (self._board.last_report(index) for index in range(self.job.num_ranks))
        return any(status not in fine for status in self.statuses()) or any(reports)

    def end(self) -> None:
        """Leave none: SIGTERM, then SIGKILL for each with all that it started."""
        self.send(signal.SIGTERM)
        until = time.monotonic() + _GRACE_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._lifeline is not None:
            os.close(self._lifeline)


def _watch(ranks: _Ranks, relay: Relay, asked: Asked) -> list[RankState]:
    """Wait until all ranks ended or the cause of a failure is known; what was known then."""
    num_passed_on, failed_at, is_gone = 0, None, False
    while True:
        relay.pump(_POLL_SECONDS)
        if asked.signal is not None and asked.num_asked > num_passed_on:
            num_passed_on += 1
            ranks.send(asked.signal)
        states, now = ranks.states(), time.monotonic()
        if all(state.ended for state in states):
            return states
        if not ranks.has_failed():
            continue
        limit = {"timeout_seconds": ranks.job.timeout_seconds, "unix_seconds": time.time()}
        was_gone, is_gone = is_gone, is_cause_gone(states, **limit)
        if failed_at is None or (is_gone and not was_gone):
            failed_at = now
        if all(state.ended or state.report for state in states) or (
            now - failed_at >= _REPORT_SECONDS
        ):
            return ranks.states()


def _how_it_ended(status: int) -> str:
    if status == -signal.SIGKILL:
        return "killed by SIGKILL, as the system does when memory runs out"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status} without a word"
