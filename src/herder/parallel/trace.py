"""Every collective of this rank in a file, before it starts (`observe.trace_collectives`).

A rank that is stopped, hangs with the interpreter's lock or is killed has so told all it entered;
torch's flight recorder is gone with the process. Whatever starts a collective (torch.distributed's
functions, functional operators, compiled code, FSDP, a pipeline), it ends in an operator of c10d,
and passes the key BackendSelect on the way, where none of them has a kernel of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import _scoped_library

from herder.observe.trace import Call, Group, Head, Note, Report, TraceFile
from herder.parallel.seat import OWN
from herder.parallel.world import Rank, coordinates

_OPERATORS = {
    "all_reduce": "allreduce_ allreduce_coalesced_",
    "all_gather": "allgather_ allgather_coalesced_",
    "all_gather_single": "_allgather_base_ allgather_into_tensor_coalesced_",
    "reduce_scatter_single": "_reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
    **{name: name for name in ("barrier", "send")},
    **{name: f"{name}_" for name in ("broadcast", "reduce", "gather", "scatter", "recv")},
    **{name: f"{name}_" for name in ("reduce_scatter", "monitored_barrier")},
}
"""c10d's, by torch.distributed's functions. Not there: a recv from whoever sends first."""


@contextmanager
def traced_collectives(folder: Path, rank: Rank, mesh_axes: Mapping[str, int]) -> Generator[None]:
    """Write what this rank does and enters, and how it ends, to a trace in `folder`.

    Around `joined`. Of several ranks, each writes from its first collective on: until they have
    met, the first one may still put the folder of an earlier start aside.
    """
    trace = _Trace(folder, rank, mesh_axes)
    OWN.listener = trace.hear
    try:
        with _scoped_library("c10d", "IMPL") as library:
            for name, operators in _OPERATORS.items():
                for operator in operators.split():
                    kernel = trace.kernel(operator, name)
                    library.impl(operator, kernel, "BackendSelect", with_keyset=True)
            yield
        trace.hear(Report(time.time(), "done", 0, "", ""))
    except BaseException as error:
        OWN.report_error(error)
        raise
    finally:
        OWN.listener = None
        trace.file.close()


class _Trace:
    def __init__(self, folder: Path, rank: Rank, mesh_axes: Mapping[str, int]) -> None:
        place = coordinates(rank.index, mesh_axes)
        self.file = TraceFile(folder, Head(rank=rank.index, num_ranks=rank.count, place=place))
        self._num_ranks = rank.count
        self._mesh_axes = mesh_axes
        self._groups = dict[str, Group]()
        self._counts = Counter[tuple[str, str, int | None]]()
        """By group, direction and peer."""

    def hear(self, line: Note | Report) -> None:
        """Write what this rank says, once it has met others."""
        if self._groups or self._num_ranks == 1:
            self.file.write(line)

    def kernel(self, operator: str, name: str) -> Callable[..., Any]:
        """What writes a line and goes on to what the operator was called for."""
        overload = getattr(torch.ops.c10d, operator).default
        at = [argument.name for argument in overload._schema.arguments].index("process_group")
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def kernel(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
            group = self._told_group(dist.ProcessGroup.unbox(arguments[at]))
            is_transfer = name in ("send", "recv")
            peer = group.ranks[arguments[at + 1]] if is_transfer else None
            counted = group.name, name if is_transfer else "", peer
            self._counts[counted] += 1
            lists = (each if isinstance(each, Sequence) else [each] for each in arguments)
            self.file.write(
                Call(
                    unix_seconds=time.time(),
                    step=OWN.last_note.step if OWN.last_note else None,
                    name=name,
                    axis=group.axis,
                    sequence=self._counts[counted],
                    shapes=[list(x.shape) for each in lists for x in each if isinstance(x, Tensor)],
                    group=group.name,
                    peer=peer,
                )
            )
            return overload.redispatch(keys & after, *arguments)

        return kernel

    def _told_group(self, group: dist.ProcessGroup) -> Group:
        if group.group_name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            axis = self._axis(group.group_desc, len(ranks))
            # Groups that were split from one at once have one name.
            told = Group(name=f"{group.group_name}:{ranks[0]}", axis=axis, ranks=ranks)
            self.file.write(told)
            self._groups[group.group_name] = told
        return self._groups[group.group_name]

    def _axis(self, description: str, num_ranks: int) -> str:
        """By the group's name in a DeviceMesh, which takes that of all ranks for an axis of all."""
        named = description.removeprefix("mesh_")
        if num_ranks == self._num_ranks:
            axes = [axis for axis, size in self._mesh_axes.items() if size == num_ranks]
            return "_".join(axes) or "world"
        split = [axis for axis in named.split("_") if self._mesh_axes.get(axis, 1) > 1]
        return "_".join(split) or named
