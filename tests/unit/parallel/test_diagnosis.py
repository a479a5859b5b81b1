"""The rank at fault among many that failed, from what each left behind."""

from __future__ import annotations

from herder.errors import RankError, TrainingError, UserError
from herder.observe.trace import Kind, Note, Report
from herder.parallel.diagnosis import RankState, diagnose

NOW, TIMEOUT = 1000.0, 10.0
AXES = {"pp": 1, "dp": 2, "fsdp": 1, "cp": 1, "tp": 2}


def note(what: str = "reduction", *, age: float = 1.0) -> Note:
    return Note(NOW - age, 7, what)


def report(kind: Kind, text: str, *, age: float = 0.5, status: int = 1) -> Report:
    collective = "all_reduce" if kind == "collective" else ""
    return Report(NOW - age, kind, status, collective, text)


def waiting(index: int, *, ended: str | None = None) -> RankState:
    told = report("collective", "all_reduce failed (Connection closed by peer)")
    return RankState(index, ended, note=note(), report=told)


def found(*states: RankState) -> Exception:
    return diagnose(states, AXES, timeout_seconds=TIMEOUT, unix_seconds=NOW)


def test_one_that_died_without_a_word_is_the_cause_of_what_others_say() -> None:
    dead = RankState(1, "killed by SIGKILL", note=note("backward"))
    confused = RankState(3, None, note=note(), report=report("bug", "KeyError: 'x'"))
    error = found(waiting(0, ended="ended with exit status 1"), dead, waiting(2), confused)
    assert isinstance(error, RankError)
    assert error.rank == 1
    told = str(error).splitlines()
    assert told[0] == "rank 1: dp 0, tp 1: killed by SIGKILL, in step 7, backward."
    assert told[1] == "  ranks 0, 2: step 7, reduction, waiting in all_reduce"
    assert told[2] == "  rank 3: step 7, reduction: KeyError: 'x'"


def test_the_first_error_of_its_own_is_the_cause() -> None:
    second = RankState(0, None, note=note(), report=report("bug", "KeyError: 'x'", age=0.1))
    first = RankState(2, None, note=note(), report=report("bug", "ValueError: boom", age=0.9))
    error = found(second, waiting(1), first)
    assert "rank 2: dp 1, tp 0: ValueError: boom, in step 7, reduction." in str(error)


def test_one_that_is_silent_while_others_complain_did_not_come() -> None:
    hung = RankState(3, None, note=note("backward", age=11.5))
    error = found(waiting(0), waiting(1), waiting(2), hung)
    assert "rank 3: dp 1, tp 1: did not come to meet the others in all_reduce" in str(error)
    assert "within train.collective_timeout_seconds=10" in str(error)
    assert "last heard of 11.5 s ago in step 7, backward" in str(error)


def test_ranks_that_abort_after_the_time_out_were_waiting() -> None:
    """As nccl's watchdog ends them, from within and without an exception."""
    aborted = RankState(0, "killed by SIGABRT", is_aborted=True, note=note(age=10.0))
    hung = RankState(1, None, note=note("backward", age=10.5))
    error = found(aborted, hung)
    assert isinstance(error, RankError)
    assert error.rank == 1
    crashed = RankState(0, "killed by SIGABRT", is_aborted=True, note=note(age=1.0))
    error = found(crashed, hung)
    assert isinstance(error, RankError)
    assert error.rank == 0


def test_where_all_complain_the_last_to_begin_is_named() -> None:
    told = report("collective", "all_reduce failed (Connection closed by peer)")
    late = RankState(2, None, note=note(age=0.6), report=told)
    assert "rank 2: dp 1, tp 0" in str(found(waiting(0), waiting(1), late))


def test_what_all_ranks_say_themselves_is_told_once_and_keeps_its_kind() -> None:
    told = report("told", "step 7: loss nan: not finite.")
    error = found(*(RankState(index, None, report=told) for index in range(4)))
    assert type(error) is TrainingError
    assert str(error) == "step 7: loss nan: not finite."
    mistake = report("told", "run_directory: no rights.", status=2)
    error = found(waiting(0), RankState(1, None, report=mistake))
    assert type(error) is UserError
    assert str(error) == "rank 1 (dp 0, tp 1): run_directory: no rights."
