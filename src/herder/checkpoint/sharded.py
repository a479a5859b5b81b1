"""Tensors that ranks hold in parts, to files and back, through torch.distributed.checkpoint.

It says which part of what a rank has, who writes what several have, and which stored pieces make up
a part under another layout. What its own file format lacks is here: safetensors, which no pickle
is in and which a model is read from without ranks, hashed and brought to the disk as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
    HuggingFaceStorageReader,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.futures import Future

from herder.checkpoint.light import full_file, read_delta
from herder.checkpoint.manifest import FileEntry, verify_manifest
from herder.checkpoint.source import DELTA
from herder.checkpoint.stream import write_tensors
from herder.errors import CheckpointError
from herder.families.weights import listed
from herder.parallel.shards import held_tensor
from herder.parallel.turns import all_ranks_say


class PlannedOnce(DefaultSavePlanner):
    """Which tensors this rank writes, settled once, since every save of a run is alike.

    Of what several ranks hold one writes it, each about as many bytes as the others. Raises
    ValueError where what they hold does not make up whole tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
        """A collective of the group; None: this process is alone."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(dict(tensors))
        own = super().create_local_plan()
        plans = [own] if group is None else all_ranks_say(own, group)
        plans, metadata = super().create_global_plan(plans)
        self._own = plans[0 if group is None else dist.get_rank(group)]
        every = tensors_of(metadata).items()
        self._num_bytes = {n: x.size.numel() * x.properties.dtype.itemsize for n, x in every}

    @property
    def num_bytes(self) -> int:
        """Of all tensors together."""
        return sum(self._num_bytes.values())

    def without(self, names: Set[str]) -> PlannedOnce:
        """The same plan for all other tensors, which needs no collective."""
        part = copy(self)
        part._num_bytes = {n: x for n, x in self._num_bytes.items() if n not in names}
        items = [item for item in self._own.items if item.index.fqn not in names]
        part._own = replace(self._own, items=items)
        return part

    def written_here(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """What this rank writes, as plain tensors: its part of each."""
        names = (item.index.fqn for item in self._own.items)
        return {name: held_tensor(tensors[name]).detach() for name in names}

    def create_local_plan(self) -> SavePlan:
        """Nothing, as all is settled."""
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Nothing either."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What was settled."""
        return self._own

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The part itself, given as a plain tensor; asked for once, and then let go of."""
        return self.state_dict.pop(index.fqn)


class SafetensorsWriter(FileSystemWriter):
    """Writes a file for each kind of tensors that this rank has something of.

    file_of: which file a tensor goes to; write: how one is written. Called on the first rank: begin
    before any rank writes, finish with the files of all; what it gives is all ranks' storage_data.
    """

    def __init__(
        self,
        folder: Path,
        file_of: Callable[[str], str],
        begin: Callable[[], None],
        finish: Callable[[dict[str, FileEntry]], object],
        write: Callable[[Path, list[WriteItem], SavePlanner], FileEntry] = write_tensors,
    ) -> None:
        super().__init__(folder)
        self._folder = folder
        self._file_of = file_of
        self._begin = begin
        self._finish = finish
        self._write = write

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is: the first rank makes the folder."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make ready. The other ranks wait for what the first one returns here."""
        self._begin()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's files; their entries of the manifest."""
        files = dict[str, list[WriteItem]]()
        for item in plan.items:
            files.setdefault(self._file_of(item.index.fqn), []).append(item)
        done: Future[Any] = Future()
        done.set_result([(f, self._write(self._folder / f, i, planner)) for f, i in files.items()])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """On the first rank, once all have written."""
        metadata.storage_data = self._finish(dict(chain.from_iterable(results)))


def read_metadata(files: Sequence[Path]) -> Metadata:
    """Which pieces of which tensors files hold, from their headers.

    Those of a light checkpoint hold the pieces that the full one's have. Raises CheckpointError for
    a file that cannot be read, a tensor that is not whole, and a full checkpoint that is another.
    """
    light = {str(full_file(path)): str(path) for path in files if path.name.endswith(DELTA)}
    for folder in {Path(path).parent for path in light.values()}:
        verify_manifest(folder)
    with _told(files[0].parent if files else "no files"):
        reader = HuggingFaceStorageReader("")
        reader.fs = _Files([*light] or files)
        stored = reader.read_metadata()
    for index, place in stored.storage_data.items() if light else ():
        stored.storage_data[index] = replace(place, relative_path=light[place.relative_path])
    torn = [
        name
        for name, each in tensors_of(stored).items()
        if sum(chunk.sizes.numel() for chunk in each.chunks) != each.size.numel()
    ]
    if torn:
        told = f"{files[0].parent}: pieces are missing of {listed(torn)}. Copy it again."
        raise CheckpointError(told)
    return stored


class _Files(FileSystem):
    """Some files, wherever they are."""

    def __init__(self, files: Sequence[Path | str]) -> None:
        self._names = list(map(str, files))

    def ls(self, path: str | PathLike[str]) -> list[str]:
        return self._names


class _Reader(HuggingFaceStorageReader):
    """Reads light checkpoints too, a whole piece at a time."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what a plan wants to where it wants it."""
        whole, name, piece = list[ReadItem](), None, None
        for item in plan.items:
            path = self.storage_data[item.storage_index].relative_path
            if not path.endswith(DELTA):
                whole.append(item)
                continue
            if piece is None or (path, item.storage_index) != name:
                name, piece = (
                    (path, item.storage_index),
                    read_delta(Path(path), item.storage_index.fqn),
                )
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            part = piece[tuple(slice(start, start + length) for start, length in spans)]
            live = planner.resolve_tensor(item).detach()
            live.copy_(part)
            planner.commit_tensor(item, live)
        return super().read_data(replace(plan, items=whole), planner)


def load_tensors(live: Mapping[str, Tensor], stored: Metadata) -> None:
    """Copy what this rank holds of live tensors out of the pieces that files hold.

    Ranks need not do it together. Raises CheckpointError for a file that cannot be read.
    """
    reader = _Reader("")
    reader.set_up_storage_reader(stored, is_coordinator=True)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(live), stored)
    plan = planner.finish_plan(planner.create_local_plan())
    with _told("a checkpoint"):
        reader.read_data(plan, planner).wait()


def refuse_misfits(
    live: Mapping[str, Tensor], stored: Metadata, *, where: object, is_part: bool
) -> None:
    """Raise CheckpointError with all names and shapes in which live and stored tensors differ.

    On several ranks all of them call it together. is_part: whether more may be stored.
    """
    found = tensors_of(stored)
    problems = [f"{name} is missing" for name in live.keys() - found.keys()]
    if not is_part:
        problems += [f"{name} is extra" for name in found.keys() - live.keys()]
    for name in live.keys() & found.keys():
        shape, wanted = tuple(found[name].size), tuple(live[name].shape)
        if shape != wanted:
            problems.append(f"{name} is {shape}, wanted {wanted}")
    told = sorted(set(chain.from_iterable(all_ranks_say(problems))))
    if told:
        lines = listed(told, separator="\n  ")
        raise CheckpointError(f"{where} does not fit this model:\n  {lines}")


def tensors_of(stored: Metadata) -> dict[str, TensorStorageMetadata]:
    """What is known of each tensor, by name."""
    every = stored.state_dict_metadata.items()
    return {name: each for name, each in every if isinstance(each, TensorStorageMetadata)}


@contextmanager
def _told(where: object) -> Generator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{where}: its tensors cannot be read: {error}") from None
