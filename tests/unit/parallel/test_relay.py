"""The lines of several ranks as one log."""

from __future__ import annotations

import io
import os
import time

from herder.parallel.relay import Relay


def relayed(*written: tuple[int, bytes]) -> str:
    """What is told of what ranks write, in that order."""
    stream = io.StringIO()
    relay = Relay(stream)
    pipes = {rank: os.pipe() for rank, _ in written}
    for rank, (reading, _) in pipes.items():
        relay.add(rank, reading)
    for rank, data in written:
        os.write(pipes[rank][1], data)
        relay.pump(0.0)
    for _, writing in pipes.values():
        os.close(writing)
    relay.close()
    return stream.getvalue()


def test_what_several_say_is_told_once_with_their_numbers() -> None:
    assert relayed((1, b"careful\n"), (2, b"careful\nother\n"), (3, b"careful\n")) == (
        "[ranks 1-3] careful\n[rank 2] other\n"
    )


def test_a_rank_that_repeats_itself_is_told_as_often() -> None:
    assert relayed((1, b"again\nagain\n"), (2, b"again\n")) == "[ranks 1-2] again\n[rank 1] again\n"


def test_lines_come_in_pieces_and_torch_has_a_prefix_of_its_own() -> None:
    pieces = ((1, b"[rank1]: Value"), (1, b"Error: boom\nno end"))
    assert relayed(*pieces) == "[rank 1] ValueError: boom\n[rank 1] no end\n"


def test_a_line_that_another_rank_said_a_while_ago_is_not_told_again() -> None:
    stream = io.StringIO()
    relay = Relay(stream)
    pipes = [os.pipe() for _ in range(2)]
    for rank, (reading, writing) in enumerate(pipes, 1):
        relay.add(rank, reading)
        os.write(writing, b"careful\n")
        until = time.monotonic() + 10
        while "careful" not in stream.getvalue() and time.monotonic() < until:
            relay.pump(0.01)
    for _, writing in pipes:
        os.close(writing)
    relay.close()
    assert stream.getvalue() == "[rank 1] careful\n"
