"""This process as a rank: what it does, why it fails, and the launcher it must not outlive.

A process is one rank at most, so its seat is the module's. Imports no torch: a launcher that is
killed while a rank still imports torch must end it too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from herder.errors import HerderError
from herder.observe.trace import Kind, Note, Report
from herder.parallel.board import Board
from herder.parallel.world import Rank, coordinates

INHERITED = "HERDER_LAUNCHER"
"""Variable with the descriptors that a rank has from its launcher: board, lifeline, and of rank 0
the socket where ranks meet, else -1."""


class Seat:
    """Where this process sits among the ranks, with what it last said."""

    def __init__(self) -> None:
        self.rank: Rank | None = None
        self.mesh_axes: Mapping[str, int] = {}
        self.board: Board | None = None
        """The launcher's; None where another program started the ranks, or nobody."""
        self.meeting_socket: int | None = None
        """Rank 0 under our launcher: it listens already, so that nobody can take its port."""
        self.last_note: Note | None = None
        self.last_report: Report | None = None
        self.listener: Callable[[Note | Report], None] | None = None
        """Told of every note and of the report."""

    def where(self) -> str:
        """Coordinates and the newest note, as the start of a message; empty without both."""
        place = coordinates(self.rank.index, self.mesh_axes) if self.rank else ""
        return "".join(f"{part}: " for part in (place, self.last_note) if part)

    def report(self, kind: Kind, text: str, *, exit_status: int = 1, collective: str = "") -> None:
        """Say why this rank fails, before its peers notice. The first report is the cause."""
        if self.last_report is None:
            self.last_report = Report(time.time(), kind, exit_status, collective, text)
            if self.board is not None and self.rank is not None:
                self.board.report(self.rank.index, self.last_report)
            if self.listener is not None:
                self.listener(self.last_report)

    def report_error(self, error: BaseException) -> None:
        """Say that this rank fails by an error of its own."""
        if isinstance(error, HerderError):
            self.report("told", str(error), exit_status=error.exit_status)
        else:
            self.report("bug", f"{type(error).__name__}: {error}")


OWN = Seat()
"""This process' seat."""


def speaks_for_all(rank: Rank | None) -> bool:
    """Whether this process says what concerns all ranks: our launcher does, else the first rank.

    To be asked before it is seated.
    """
    return rank is None or (rank.index == 0 and INHERITED not in os.environ)


def note(step: int | None, what: str) -> None:
    """Say what this rank does from now on, as `note(12, "gradient reduction")`.

    Shown for every rank when one fails. It costs a microsecond, so call it at each phase of a step,
    before the collectives of the phase. step: counted from 1, None outside of steps.
    """
    OWN.last_note = Note(time.time(), step, what)
    if OWN.board is not None and OWN.rank is not None:
        OWN.board.note(OWN.rank.index, OWN.last_note)
    if OWN.listener is not None:
        OWN.listener(OWN.last_note)


def note_phase(what: str) -> None:
    """Say what this rank does from now on within the step of its last note."""
    note(OWN.last_note.step if OWN.last_note else None, what)


@contextmanager
def seated(rank: Rank | None) -> Generator[None]:
    """Be a rank under the launcher that started this process, if one did.

    Under it a rank ends when the launcher is gone, and tells its errors to it alone, so that they
    are told once: an error of the tree becomes SystemExit with its status.
    """
    inherited = os.environ.pop(INHERITED, None)  # not for what this process starts
    if rank is None or inherited is None:
        yield
        return
    board, lifeline, meeting_socket = map(int, inherited.split(","))
    OWN.rank, OWN.board = rank, Board(board, rank.count)
    OWN.meeting_socket = meeting_socket if meeting_socket >= 0 else None
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    note(None, "starting")
    try:
        yield
    except HerderError as error:
        OWN.report_error(error)
        raise SystemExit(OWN.last_report.exit_status if OWN.last_report else 1) from None
    except Exception as error:
        OWN.report_error(error)
        raise


def _end_with(lifeline: int) -> None:
    """Wait until the launcher's end of the pipe closes, then end with all this rank started.

    Nothing is saved: the next run may hold the directory already. Checkpoints are whole or not
    there.
    """
    while os.read(lifeline, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
