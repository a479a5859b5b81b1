"""Traces: what a rank wrote is there after a kill, and no more than its newest lines is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from herder.observe import trace as written
from herder.observe.trace import (
    Call,
    Group,
    Head,
    Line,
    Note,
    Report,
    TraceFile,
    read_traces,
)

NOTE = Note(1.0, 3, "forward and backward")
GROUP = Group(name="0:0", axis="dp", ranks=[0, 1])
END = Report(9.0, "collective", 1, "all_reduce", "all_reduce failed (Timed out)")


def call(sequence: int, **changes: object) -> Call:
    fields = {"name": "all_reduce", "axis": "dp", "shapes": [[4, 8], []], "group": "0:0"}
    return Call(unix_seconds=2.0 + sequence, step=3, sequence=sequence, **{**fields, **changes})


def write(folder: Path, *lines: Line, rank: int = 1, num_ranks: int = 2) -> Path:
    """The file of that rank."""
    file = TraceFile(folder, Head(rank=rank, num_ranks=num_ranks, place=f"dp {rank}"))
    for line in lines:
        file.write(line)
    file.close()
    return folder / f"rank-{rank:05d}.jsonl"


def test_what_a_rank_wrote_is_read_again(tmp_path: Path) -> None:
    sent = call(1, name="send", peer=0)
    write(tmp_path / "new", NOTE, GROUP, call(1), sent, END)
    trace = read_traces(tmp_path / "new")[1]
    assert (trace.place, trace.groups) == ("dp 1", {"0:0": [0, 1]})
    assert (trace.note, trace.calls, trace.ending) == (NOTE, [call(1), sent], END)
    assert str(sent) == "send to 0 [4,8] [], number 1 on axis dp, step 3"


def test_a_line_is_there_before_the_file_is_closed(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, Head(rank=0, num_ranks=1, place=""))
    for number in (1, 2):
        file.write(call(number))
        assert len(read_traces(tmp_path)[0].calls) == number
    file.close()


def test_a_torn_line_and_lines_of_other_programs_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, GROUP, call(1), call(2))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-1], b'{"line": "Other"}\n[]\n\xff\n', lines[-1][:40]]))
    assert read_traces(tmp_path)[1].calls == [call(1)]


def test_ranks_without_a_file_have_an_empty_trace(tmp_path: Path) -> None:
    write(tmp_path, call(1), rank=2, num_ranks=4)
    write(tmp_path, rank=3)  # has not written anything yet
    (tmp_path / "rank-00001.jsonl").write_text('{"line": "He')
    traces = read_traces(tmp_path)
    assert list(traces) == [0, 1, 2, 3]
    assert [len(trace.calls) for trace in traces.values()] == [0, 0, 1, 0]
    assert read_traces(tmp_path / "none") == {}


def test_only_the_newest_lines_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "LINES_A_FILE", 10)
    write(tmp_path, GROUP, *map(call, range(1, 36)))
    trace = read_traces(tmp_path)[1]
    numbers = [each.sequence for each in trace.calls]
    assert numbers[-1] == 35
    assert numbers == list(range(numbers[0], 36)), "none is missing, nor told twice"
    assert 8 <= len(numbers) <= 20
    assert trace.groups == {"0:0": [0, 1]}, "told again in each file"
    assert {path.name for path in tmp_path.iterdir()} == {
        "rank-00001.jsonl",
        "rank-00001.before.jsonl",
    }


def test_a_disk_that_cannot_be_written_is_told_once(tmp_path: Path, capsys) -> None:
    (tmp_path / "collectives").write_text("a file where the folder would be")
    write(tmp_path / "collectives", NOTE, call(1), call(2))
    err = capsys.readouterr().err
    assert err.count("herder: rank-00001.jsonl: no more is traced: ") == 1
