"""What a checkpoint costs a run: how long training stands still, and how fast the disk is written.

The state of a real architecture with AdamW's moments, in fp32, in one process: saved behind the
steps, saved while training waits, and by torch's own `dcp.save` with its own files; beside what
`dd` writes to the same disk, each of them forced to it. Then read back, and on two ranks under
another layout than that of the ranks which saved it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

from herder.checkpoint.metadata import ExperimentMeta, config_hash
from herder.checkpoint.run import (
    CheckpointWriter,
    DataPosition,
    Progress,
    TrainTensors,
    load_checkpoint,
)
from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import model_config_json
from herder.config.run import CheckpointConfig, OptimizerConfig
from herder.families.registry import architecture_from_hf
from herder.model.build import build_decoder, initialize_weights
from herder.parallel.apply import apply
from herder.parallel.mesh import build_mesh, storage_group
from herder.parallel.ranks import run_on_ranks
from herder.parallel.shards import copy_part
from herder.train.optimizer import build_optimizer
from herder.train.state import state_tensors
from herder.train.verify_layouts import parse_layout, plan_layout

MODELS = ("smollm2-135m", "qwen2.5-0.5b")
STALL_AIM, WRITE_AIM = 0.10, 0.80
SAVED_BY, LOADED_BY = "fsdp=2", "pp=2"
_MIB = 1 << 20


def compare(console: Console, precision: str, arguments: argparse.Namespace) -> list[dict]:
    """The rows of both models."""
    return [
        row for model in MODELS for row in _of_model(console, model, precision, arguments.repeats)
    ]


def _of_model(console: Console, model: str, precision: str, repeats: int) -> list[dict]:
    disk = Path("runs").resolve()
    disk.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="saving-", dir=disk))
    try:
        found = run_on_ranks(_one_process, 1, model, folder, repeats, timeout_seconds=3_600.0)[0]
        shutil.rmtree(folder)
        run_on_ranks(_save_on_ranks, 2, model, folder, timeout_seconds=3_600.0)
        loads = run_on_ranks(_load_on_ranks, 2, model, folder, timeout_seconds=3_600.0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size, dd = found["gigabytes"], found["dd"]
    found[f"load, {SAVED_BY} -> {LOADED_BY}"] = max(loads)
    waits = found["synchronous"]
    table = Table(title=f"saving {model}, {size:.2f} GB of fp32 state with AdamW's moments")
    for heading in ("", "seconds", "GB/s", "of a synchronous save", "of dd"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = []
    for name, seconds in found.items():
        if name == "gigabytes":
            continue
        row = {"work": "saving", "precision": precision, "model": model, "setting": name}
        row |= {"seconds": seconds, "gb_per_second": size / seconds}
        row |= {"ratio_to_synchronous": seconds / waits, "ratio_to_dd": dd / seconds}
        rows.append(row)
        told = [f"{seconds:.2f}", f"{size / seconds:.2f}", f"{seconds / waits:.1%}"]
        table.add_row(name, *told, f"{dd / seconds:.0%}")
    aims = f"aims: a stall under {STALL_AIM:.0%} of a synchronous save, written at {WRITE_AIM:.0%}"
    console.print(table, f"{aims} of what dd reaches; medians of {repeats} in turns")
    return rows


def _one_process(model: str, folder: Path, repeats: int) -> dict[str, float]:
    """Median seconds of each way, which take turns; the first round, in which memory is new, does
    not count."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    tensors, architecture = _state(model, "dp=1")
    writer = CheckpointWriter(tensors)
    num_bytes = sum(tensor.nbytes for tensor in tensors.all.values())
    rounds: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        rounds.setdefault(name, []).append(seconds)

    for step in range(repeats + 1):
        begin = time.perf_counter()
        save = _begin(writer, folder, tensors, architecture, 2 * step, in_background=True)
        note("asynchronous: training stands still", time.perf_counter() - begin)
        save.result()
        note("asynchronous: until it is whole", time.perf_counter() - begin)
        note("synchronous", _timed(partial(_whole, writer, folder, tensors, architecture, step)))
        plain = {name: tensor.detach() for name, tensor in tensors.all.items()}
        note("dcp.save", _timed(partial(dcp.save, plain, checkpoint_id=folder / "dcp")))
        shutil.rmtree(folder / "dcp")
        note("dd", _timed(partial(_dd, folder / "dd", num_bytes)))
        (folder / "dd").unlink()
        note("load", _seconds_of_load(folder, tensors, architecture, step))
    told = {name: median(seconds[1:]) for name, seconds in rounds.items()}
    return {"gigabytes": num_bytes / 1e9, **told}


def _whole(
    writer: CheckpointWriter,
    folder: Path,
    tensors: TrainTensors,
    architecture: ArchitectureConfig,
    step: int,
) -> None:
    _begin(writer, folder, tensors, architecture, 2 * step + 1, in_background=False).result()


def _seconds_of_load(
    folder: Path, tensors: TrainTensors, architecture: ArchitectureConfig, step: int
) -> float:
    """After what it reads has left the page cache, as after a restart on another machine."""
    newest = folder / "checkpoints" / f"step-{2 * step + 1:08d}"
    for path in newest.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    known = architecture.model_dump(mode="json")
    return _timed(partial(load_checkpoint, newest, tensors, architecture=known))


def _begin(
    writer: CheckpointWriter,
    folder: Path,
    tensors: TrainTensors,
    architecture: ArchitectureConfig,
    step: int,
    *,
    in_background: bool,
) -> Any:
    position = DataPosition(corpus="", seed=0, step=step)
    return writer.save(
        folder,
        tensors,
        progress=Progress(step=step, tokens=0, data=position, schedule={}),
        meta=ExperimentMeta(
            model="bench",
            family="llama",
            architecture=architecture.model_dump(mode="json"),
            config={},
            config_hash=config_hash({}),
            plan={},
            git_commit=None,
            versions={},
            step=step,
            unix_seconds=0.0,
        ),
        model_files={},
        policy=CheckpointConfig(keep_last=1),
        in_background=in_background,
    )


def _state(model: str, layout: str) -> tuple[TrainTensors, ArchitectureConfig]:
    """What this rank holds after a step of AdamW."""
    architecture = architecture_from_hf(model_config_json(model), name=model)
    plan = plan_layout(architecture, parse_layout(layout))
    mesh = build_mesh(plan.mesh_axes, "cpu") if plan.layout.num_ranks > 1 else None
    decoder = build_decoder(architecture)
    apply(decoder, plan, mesh, device=torch.device("cpu"))
    initialize_weights(decoder, seed=0, place=copy_part)
    optimizer = build_optimizer(decoder.named_parameters(), OptimizerConfig())
    for parameter in decoder.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return state_tensors(decoder, optimizer, has_copies=False), architecture


def _save_on_ranks(model: str, folder: Path) -> None:
    tensors, architecture = _state(model, SAVED_BY)
    axes = plan_layout(architecture, parse_layout(SAVED_BY)).mesh_axes
    writer = CheckpointWriter(tensors, storage_group(build_mesh(axes, "cpu")))
    _begin(writer, folder, tensors, architecture, 1, in_background=False).result()


def _load_on_ranks(model: str, folder: Path) -> float:
    tensors, architecture = _state(model, LOADED_BY)
    return _seconds_of_load(folder, tensors, architecture, 0)


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _dd(path: Path, num_bytes: int) -> None:
    """Zeros, 16 MiB at a time, forced to the disk at the end."""
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={16 * _MIB}", "conv=fsync"]
    command.append(f"count={num_bytes // (16 * _MIB)}")
    subprocess.run(command, check=True, capture_output=True)
