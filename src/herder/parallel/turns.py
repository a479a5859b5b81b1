"""What one rank does for all of them: filling a cache that others read, deciding for all."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from herder.errors import HerderError

Told = TypeVar("Told")


@contextmanager
def first_rank_first() -> Generator[None]:
    """The block on the first rank, then on the others; in one process, just the block."""
    is_alone = not dist.is_initialized()
    if not is_alone and dist.get_rank() > 0:
        dist.barrier()
    yield
    if not is_alone and dist.get_rank() == 0:
        dist.barrier()


def first_rank_decides(decide: Callable[[], Told]) -> Told:
    """What `decide` gives on the first rank, on all of them; an error of ours is raised on all.

    It has to be picklable.
    """
    if not dist.is_initialized():
        return decide()
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = decide()
        except HerderError as error:
            told[1] = error
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    return told[0]


def place_among_ranks() -> tuple[int, int]:
    """(index, count) of this rank; (0, 1) in one process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_ranks_say(own: Told, group: dist.ProcessGroup | None = None) -> list[Told]:
    """What every rank says, first rank first, on all of them; in one process, what it says.

    It has to be picklable. group: None for all ranks.
    """
    if not dist.is_initialized():
        return [own]
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, own, group=group)
    return told
