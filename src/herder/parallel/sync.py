"""When gradients are summed over ranks: what copies and shards both offer a training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Sync(Protocol):
    """When gradients are summed over the ranks that share a step's micro-batches."""

    def expect_last(self, *, is_last: bool) -> None:
        """Say whether the backward that comes next is the step's last."""

    def finish(self) -> None:
        """Return when all sums are there. To be called after the last backward."""

    def release(self) -> None:
        """Let go of what a forward without a backward left behind."""


class SyncOfAll:
    """That of several parts of a model; of none, in one process, there is nothing to do."""

    def __init__(self, parts: Sequence[Sync] = ()) -> None:
        self.parts = tuple(parts)

    def expect_last(self, *, is_last: bool) -> None:
        """Say whether the backward that comes next is the step's last."""
        for part in self.parts:
            part.expect_last(is_last=is_last)

    def finish(self) -> None:
        """Return when all sums are there. To be called after the last backward."""
        for part in self.parts:
            part.finish()

    def release(self) -> None:
        """Let go of what a forward without a backward left behind."""
        for part in self.parts:
            part.release()
