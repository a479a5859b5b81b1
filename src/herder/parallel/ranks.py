"""A function on several ranks of this machine at once: processes that start in milliseconds.

They are forks of a server that has imported torch and run nothing, so that a comparison of twenty
layouts does not import it a hundred times. Owns their start, their end, and whose error it was.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from herder.errors import RankError
from herder.parallel.mesh import Rank, joined

_HOST = "127.0.0.1"
_GRACE_SECONDS = 5.0
_PRELOADED = ["herder.parallel.apply", "herder.parallel.ranks"]
"""Named, not imported: the compiler and FSDP would take each rank seconds to import."""


@dataclass(frozen=True)
class _Job:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_ranks: int
    num_threads: int
    port: int
    timeout_seconds: float


def run_on_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    timeout_seconds: float = 60.0,
    num_threads: int = 1,
) -> list[Any]:
    """What `function(*arguments)` returns on each of `num_ranks` CPU ranks, in a gloo group.

    Function and arguments are pickled. timeout_seconds: of one collective. Raises RankError with
    the first rank that failed and its traceback; no process is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    job = _Job(function, arguments, num_ranks, num_threads, store.port, timeout_seconds)
    processes, pipes = list[BaseProcess](), list[Connection]()
    try:
        for index in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_be_a_rank, args=(job, index, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _collect(processes, pipes)
    finally:
        _end(processes)


def _collect(processes: list[BaseProcess], pipes: list[Connection]) -> list[Any]:
    results = dict[int, Any]()
    while len(results) < len(pipes):
        waiting = {pipe: index for index, pipe in enumerate(pipes) if index not in results}
        ready = wait(list(waiting))
        for pipe, index in waiting.items():
            if pipe not in ready:
                continue
            try:
                is_fine, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[index].join(_GRACE_SECONDS)
                raise RankError(_how_it_ended(processes[index]), rank=index) from None
            if not is_fine:
                raise RankError(value, rank=index)
            results[index] = value
    return [results[index] for index in range(len(pipes))]


def _how_it_ended(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code}, and said nothing"


def _end(processes: list[BaseProcess]) -> None:
    """No process is left: those still there get SIGTERM, and SIGKILL where that does not help."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    until = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _be_a_rank(job: _Job, index: int, pipe: Connection) -> None:
    torch.set_num_threads(job.num_threads)
    rank = Rank(index, job.num_ranks, index)
    store = dist.TCPStore(_HOST, job.port, is_master=False)
    try:
        with joined(rank, torch.device("cpu"), timeout_seconds=job.timeout_seconds, store=store):
            answer: tuple[bool, Any] = True, job.function(*job.arguments)
            dist.barrier()
    except BaseException:
        answer = False, traceback.format_exc()
    # multiprocessing would send tensors as files of a process that is gone by then
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    os._exit(0 if answer[0] else 1)  # nothing of a broken group is waited for
