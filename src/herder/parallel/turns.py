"""What one rank does for all of them: filling a cache that others read, deciding for all."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

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
    """What `decide` gives on the first rank, on all of them. It has to be picklable."""
    if not dist.is_initialized():
        return decide()
    told: list[Any] = [decide() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    return told[0]
