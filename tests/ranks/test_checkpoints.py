"""What one layout saves another loads, bit for bit: parameters, buffers, moments, step counts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from herder.checkpoint.directory import checkpoint_path
from herder.checkpoint.huggingface import (
    export_run,
    load_decoder,
    save_huggingface,
    stored_dtype,
)
from herder.checkpoint.run import CheckpointWriter, load_checkpoint
from herder.checkpoint.source import resolve_model
from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import model_config_json
from herder.config.run import CheckpointConfig, OptimizerConfig
from herder.errors import CheckpointError, PlanError
from herder.families.registry import architecture_from_hf, architecture_to_hf, family_of
from herder.model.build import build_decoder, initialize_weights
from herder.parallel.apply import apply
from herder.parallel.mesh import build_mesh, storage_group
from herder.parallel.ranks import run_on_ranks
from herder.parallel.shards import copy_part, held_tensor, whole_tensor
from herder.plan.training import TrainingPlan
from herder.train.optimizer import build_optimizer
from herder.train.shrink import shrunk
from herder.train.state import saved_buffers, state_tensors
from herder.train.step import StepSettings, train_step
from herder.train.verify_layouts import (
    MAX_RANKS,
    SEQUENCE_LENGTH,
    VerifyLayout,
    every_layout,
    parse_layouts,
    plan_layout,
)
from tests.tiny import meta_at, micro_batches, progress_at

MODELS = ("llama-debug", "moe-debug", "mla-debug")
"""Dense with a tied head and two heads of keys, with experts, and with a latent and both."""
ODD = parse_layouts(["fsdp=3", "fsdp=3,zero=1,tp=2", "dp=1", "fsdp=8"])


@dataclass(frozen=True)
class Hop:
    """Load what was saved before, do a step, and save."""

    architecture: ArchitectureConfig
    plan: TrainingPlan
    run_directory: Path
    step: int
    """At 0 there is nothing to load."""
    model_files: dict[str, bytes]
    num_micro_batches: int
    """Of a step over all ranks."""

    @property
    def expected(self) -> Path:
        """Where the whole tensors of the step before lie."""
        return self.run_directory / "expected.safetensors"


def hop(case: Hop) -> tuple[list[str], dict[str, Tensor]]:
    """(names of tensors that were loaded other than they were saved, whole tensors saved now)."""
    plan, device = case.plan, torch.device("cpu")
    mesh = build_mesh(plan.mesh_axes, "cpu") if plan.layout.num_ranks > 1 else None
    decoder = build_decoder(case.architecture)
    parallel = apply(decoder, plan, mesh, device=device)
    optimizer = build_optimizer(decoder.named_parameters(), OptimizerConfig(epsilon=1e-5))
    group = storage_group(mesh)
    live = state_tensors(decoder, optimizer)
    architecture = case.architecture.model_dump(mode="json")
    wrong = list[str]()
    if case.step:
        expected = load_file(case.expected)
        for tensor in live.all.values():
            held_tensor(tensor).fill_(torch.nan)
        before = checkpoint_path(case.run_directory, case.step - 1)
        assert load_checkpoint(before, live, architecture=architecture).step == case.step - 1
        wrong = [n for n, x in live.all.items() if not _is_same(whole_tensor(x), expected[n])]
    else:
        initialize_weights(decoder, seed=0, place=copy_part)
        for buffer in decoder.buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)))
    settings = StepSettings(
        device=device, precision="fp32", loss_chunk_tokens=24, clip_norm=1.0, parallel=parallel
    )
    index, count = parallel.data_shard
    batches = micro_batches(case.step, case.num_micro_batches, SEQUENCE_LENGTH)
    batches += [batches[0].emptied()] * (-len(batches) % count)
    train_step(decoder.train(), optimizer, batches[index::count], settings)
    saved = state_tensors(decoder, optimizer, has_copies=False)
    _save(case, CheckpointWriter(saved, group), saved)
    return wrong, {name: whole_tensor(tensor).clone() for name, tensor in live.all.items()}


def _is_same(a: Tensor, b: Tensor) -> bool:
    """To the last bit, the sign of a zero included."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _save(case: Hop, writer: CheckpointWriter, tensors: Any) -> None:
    """In the background at every second step; what is saved is what was there when it began."""
    save = writer.save(
        case.run_directory,
        tensors,
        progress=progress_at(case.step),
        meta=meta_at(case.step, case.architecture.model_dump(mode="json")),
        model_files=case.model_files,
        policy=CheckpointConfig(keep_last=2),
        in_background=case.step % 2 == 0,
    )
    kept = {name: held_tensor(tensor).clone() for name, tensor in tensors.all.items()}
    for tensor in tensors.all.values() if case.step % 2 == 0 else ():
        held_tensor(tensor).zero_()
    save.result()
    for name, tensor in tensors.all.items():
        held_tensor(tensor).copy_(kept[name])


def travel(
    name: str,
    layouts: Sequence[VerifyLayout],
    run_directory: Path,
    model_files: dict[str, bytes] | None = None,
) -> dict[str, Tensor]:
    """Through the layouts in turn: each loads what the one before saved. The last one's tensors."""
    architecture = small(name)
    expected = dict[str, Tensor]()
    for step, layout in enumerate(layouts):
        plan = plan_layout(architecture, layout)
        files, num_micro_batches = model_files or {}, layout.num_micro_batches
        case = Hop(architecture, plan, run_directory, step, files, num_micro_batches)
        save_file(expected, case.expected)
        told = run_on_ranks(hop, plan.layout.num_ranks, case, timeout_seconds=300.0)
        wrong = {each for rank, _ in told for each in rank}
        way = f"{layouts[step - 1].text} -> {layout.text}"
        assert not wrong, f"{way}: {len(wrong)} of {len(expected)} tensors differ: {sorted(wrong)}"
        expected = {n: tensor for _, whole in told[::-1] for n, tensor in whole.items()}
        assert any(n.startswith("exp_avg_sq.") and x.any() for n, x in expected.items())
        _check_nothing_is_written_twice(checkpoint_path(run_directory, step), expected)
    return expected


def small(name: str) -> ArchitectureConfig:
    return shrunk(architecture_from_hf(model_config_json(name), name=name))


def _check_nothing_is_written_twice(checkpoint: Path, expected: dict[str, Tensor]) -> None:
    num_values = 0
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            shapes = [torch.Size(file.get_slice(name).get_shape()) for name in names]
            num_values += sum(shape.numel() for shape in shapes)
    assert num_values == sum(tensor.numel() for tensor in expected.values())


def legal(name: str, layouts: Sequence[VerifyLayout]) -> list[VerifyLayout]:
    """Those that the model can be laid out in; recompute is nothing that a checkpoint could see."""
    architecture = small(name)
    found = []
    for layout in layouts:
        try:
            plan_layout(architecture, layout)
        except PlanError:
            continue
        found += [layout] if layout.recompute == "none" else []
    return found


def shuffled(name: str, seed: int) -> list[VerifyLayout]:
    layouts = legal(name, [*every_layout(has_experts=name != "llama-debug"), *ODD])
    random.Random(f"{name} {seed}").shuffle(layouts)
    return layouts


QUICK = {
    "llama-debug": ["fsdp=3,zero=1,tp=2", "tp=4", "fsdp=2,zero=2,pp=2", "dp=2"],
    "moe-debug": ["fsdp=4,ep=4", "dp=2,tp=2,ep=2", "fsdp=2,cp=2,context=ring,ep=2"],
    "mla-debug": ["dp=2,fsdp=2,ep=2", "pp=2,schedule=interleaved_1f1b", "dp=1"],
}


@pytest.mark.parametrize("name", QUICK)
def test_what_one_layout_saves_another_loads_to_the_last_bit(name: str, tmp_path: Path) -> None:
    travel(name, parse_layouts(QUICK[name]), tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_two_layouts_drawn_by_chance_understand_each_other(name: str, tmp_path: Path) -> None:
    small = [layout for layout in shuffled(name, seed=0) if layout.num_ranks <= MAX_RANKS // 2]
    travel(name, small[:2], tmp_path)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama-debug", "fsdp=2,pp=2"), ("moe-debug", "fsdp=2,tp=2,ep=2")],
)
def test_what_ranks_saved_is_a_model_that_one_process_loads_and_takes_elsewhere(
    name: str, layout: str, tmp_path: Path
) -> None:
    architecture, family = small(name), family_of(model_config_json(name), name=name).name
    config = json.dumps(architecture_to_hf(architecture, family=family)).encode()
    run = tmp_path / "run"
    run.mkdir()
    saved = travel(name, parse_layouts([layout]), run, {"config.json": config})
    assert len(list(run.glob("checkpoints/*/model-*.safetensors"))) == 4
    source = resolve_model(str(run))
    assert (source.weights, stored_dtype(source)) == ("run", torch.float32)
    decoder = load_decoder(source)
    loaded = {**dict(decoder.named_parameters()), **saved_buffers(decoder)}
    assert all(_is_same(tensor.detach(), saved[name]) for name, tensor in loaded.items())
    save_huggingface(decoder, tmp_path / "whole", family=family, like=source)
    export_run(source, tmp_path / "piecewise", dtype=torch.float32)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "piecewise" / path.name).read_bytes(), path.name
    with pytest.raises(CheckpointError, match=r"pieces are missing of|does not fit"):
        load_decoder(replace(source, files=source.files[:-1]))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_saves_and_loads_what_another_one_did(
    name: str, seed: int, tmp_path: Path
) -> None:
    layouts = shuffled(name, seed)
    assert len(layouts) > 40, [layout.text for layout in layouts]
    travel(name, layouts, tmp_path)
