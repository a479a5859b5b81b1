"""A light checkpoint that ranks wrote is their weights to the bit, in any other layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from herder.checkpoint.directory import checkpoint_path
from herder.checkpoint.huggingface import export_run, load_decoder, stored_dtype
from herder.checkpoint.run import CheckpointWriter
from herder.checkpoint.sharded import load_tensors, read_metadata
from herder.checkpoint.source import model_pieces, resolve_model
from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import model_config_json
from herder.config.run import CheckpointConfig, OptimizerConfig
from herder.families.registry import architecture_from_hf, architecture_to_hf, family_of
from herder.model.build import build_decoder, initialize_weights
from herder.model.decoder import Decoder
from herder.parallel.apply import apply
from herder.parallel.mesh import build_mesh, storage_group
from herder.parallel.ranks import run_on_ranks
from herder.parallel.shards import copy_part, held_tensor, whole_tensor
from herder.plan.training import TrainingPlan
from herder.train.optimizer import build_optimizer
from herder.train.shrink import shrunk
from herder.train.state import saved_buffers, state_tensors
from herder.train.verify_layouts import parse_layouts, plan_layout
from tests.tiny import meta_at, progress_at


@dataclass(frozen=True)
class Case:
    architecture: ArchitectureConfig
    plan: TrainingPlan
    run: Path
    model_files: dict[str, bytes]

    @property
    def light(self) -> Path:
        return checkpoint_path(self.run, 2, is_light=True)


def laid_out(case: Case) -> Decoder:
    mesh = build_mesh(case.plan.mesh_axes, "cpu")
    decoder = build_decoder(case.architecture)
    apply(decoder, case.plan, mesh, device=torch.device("cpu"))
    return decoder


def save(case: Case) -> dict[str, Tensor]:
    """A full checkpoint, then a light one of other weights; those weights, whole."""
    decoder = laid_out(case)
    initialize_weights(decoder, seed=0, place=copy_part)
    optimizer = build_optimizer(decoder.named_parameters(), OptimizerConfig())
    state = state_tensors(decoder, optimizer, has_copies=False)
    writer = CheckpointWriter(state, storage_group(build_mesh(case.plan.mesh_axes, "cpu")))
    full = None
    for step in (1, 2):
        for tensor in state.model.values():
            held_tensor(tensor).mul_(1.001).add_(1e-3)
        full = (
            writer.save(
                case.run,
                state,
                progress=progress_at(step),
                meta=meta_at(step, case.architecture.model_dump(mode="json")),
                model_files=case.model_files,
                policy=CheckpointConfig(keep_last=1),
                in_background=True,
                base=full,
            )
            .result()
            .path
        )
    return {name: whole_tensor(tensor).clone() for name, tensor in state.model.items()}


def load(case: Case) -> dict[str, Tensor]:
    decoder = laid_out(case)
    live = {**dict(decoder.named_parameters()), **saved_buffers(decoder)}
    live = {name: tensor.detach() for name, tensor in live.items()}
    for tensor in live.values():
        held_tensor(tensor).zero_()
    load_tensors(live, read_metadata(model_pieces(case.light)))
    return {name: whole_tensor(tensor).clone() for name, tensor in live.items()}


def test_what_ranks_wrote_is_restored_to_the_bit_elsewhere(tmp_path: Path) -> None:
    name = "moe-debug"
    config_json = model_config_json(name)
    architecture = shrunk(architecture_from_hf(config_json, name=name))
    family = family_of(config_json, name=name).name
    files = {"config.json": json.dumps(architecture_to_hf(architecture, family=family)).encode()}
    first, second = parse_layouts(["fsdp=2,ep=2", "fsdp=3"])
    case = Case(architecture, plan_layout(architecture, first), tmp_path, files)
    saved, _ = run_on_ranks(save, 2, case, timeout_seconds=300.0)
    assert len(list(case.light.glob("model-*.delta.zip"))) == 2
    other = Case(architecture, plan_layout(architecture, second), tmp_path, files)
    for loaded in run_on_ranks(load, 3, other, timeout_seconds=300.0):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    source = resolve_model(str(case.light))
    assert stored_dtype(source) == torch.float32
    decoder = load_decoder(source)
    assert all(torch.equal(x, saved[name]) for name, x in decoder.named_parameters())
    export_run(source, tmp_path / "exported", dtype=torch.float32)
    embedding = load_file(tmp_path / "exported" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(embedding, saved["embed.weight"])
