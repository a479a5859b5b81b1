"""The process group and the mesh of a plan: joining, leaving, and the axes ranks stand on."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from herder.parallel.failures import Alarm, told_failures
from herder.parallel.seat import OWN, note
from herder.parallel.world import AXES, Rank, meeting_point, refuse_other_world

__all__ = ["AXES", "Rank", "build_mesh", "joined", "refuse_other_world"]

_MEETING_SECONDS = 300.0
"""Ranks may start that far apart, however short the time-out of a collective is."""

_STORAGE_SECONDS = 3_600.0
"""How much longer than another one a rank may write, on a disk that they share."""


@contextmanager
def joined(
    rank: Rank, device: torch.device, *, timeout_seconds: float, store: dist.Store | None = None
) -> Generator[None]:
    """Be one of the ranks for a while. A collective that takes longer than the time-out fails.

    store: where ranks meet; None: where the launcher, torchrun or Slurm says. Raises RankError for
    a collective that fails, with this rank's coordinates and step.
    """
    OWN.rank = rank
    timeout = timedelta(seconds=timeout_seconds)
    # Groups of a mesh take the module's time-out, not that of the group of all ranks.
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.distributed_c10d.default_pg_nccl_timeout = timeout
    asks_others = store is None and OWN.board is None
    note(None, "joining the others")
    with told_failures():
        store = store or _meet(rank, timeout_seconds)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=rank.index,
            world_size=rank.count,
            timeout=timeout,
            store=store,
            device_id=device if device.type == "cuda" else None,
        )
    try:
        alarm = Alarm(store, timeout_seconds=timeout_seconds) if asks_others else nullcontext()
        with alarm as asked, told_failures(asked):
            yield
    except BaseException:
        if device.type != "cuda":  # nccl would wait for the collective that failed
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def build_mesh(mesh_axes: Mapping[str, int], device_type: str) -> DeviceMesh:
    """The mesh of a plan over all ranks of the process group."""
    refuse_other_world(mesh_axes, dist.get_world_size())
    OWN.mesh_axes = mesh_axes
    return init_device_mesh(
        device_type, tuple(mesh_axes[axis] for axis in AXES), mesh_dim_names=AXES
    )


def storage_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """All ranks once more, for what a thread of theirs does beside the steps: neither's collectives
    can be mistaken for the other's. A collective itself; None for one process.
    """
    if mesh is None:
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_STORAGE_SECONDS))
    assert isinstance(group, dist.ProcessGroup), "a group of all ranks has this one"
    return group


def build_state_mesh(
    mesh_axes: Mapping[str, int], device_type: str, *, num_expert_ranks: int, is_sharded: bool
) -> DeviceMesh:
    """The same ranks as those that hold parameters stand: cp is folded into fsdp.

    num_expert_ranks: how many of those hold different experts, 1 for other parameters. They are the
    innermost, and so neighbours; fsdp are then those that hold the same. is_sharded: by ZeRO, whose
    copies dp are; without it all are copies, and fsdp too.
    """
    holders = mesh_axes["dp"] * mesh_axes["fsdp"] * mesh_axes["cp"] // num_expert_ranks
    copies = mesh_axes["dp"] if is_sharded else 1
    names = ("pp", "dp", "fsdp", "ep", "tp")
    shape = (mesh_axes["pp"], copies, holders // copies, num_expert_ranks, mesh_axes["tp"])
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def _meet(rank: Rank, timeout_seconds: float) -> dist.Store:
    """The store, once all ranks are there."""
    host, port = meeting_point(os.environ)
    waits = timedelta(seconds=max(_MEETING_SECONDS, timeout_seconds))
    store: dist.Store
    if OWN.board is None:
        address = f"[{host}]" if ":" in host else host
        url = f"tcp://{address}:{port}"
        store, _, _ = next(dist.rendezvous(url, rank.index, rank.count, timeout=waits))
    else:
        store = dist.TCPStore(
            host,
            port,
            rank.count,
            is_master=OWN.meeting_socket is not None,
            timeout=waits,
            master_listen_fd=OWN.meeting_socket,
        )
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store
