"""A checkpoint of a GPU's state: pinned copies on the host, and a gloo group beside nccl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from herder.checkpoint.run import CheckpointWriter, load_checkpoint
from herder.config.run import CheckpointConfig
from herder.parallel.mesh import Rank, build_mesh, joined, storage_group
from herder.parallel.shards import held_tensor
from herder.train.state import state_tensors
from tests.tiny import (
    meta_at,
    micro_batches,
    plan_on_cpus,
    planned_trainer,
    progress_at,
    tiny_model,
)

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("default")]


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    """A process group of one rank, over nccl."""
    device = torch.device("cuda", 0)
    with joined(Rank(0, 1, 0), device, timeout_seconds=60, store=dist.HashStore()):
        yield


@pytest.mark.usefixtures("alone_in_a_group")
def test_what_is_saved_behind_the_steps_is_what_was_on_the_gpu_when_it_began(
    tmp_path: Path,
) -> None:
    model = tiny_model("dd", head_dim=16)
    plan = plan_on_cpus(model, layout={"zero_stage": 3})
    trained = planned_trainer(model, plan, device="cuda", in_a_group=True)
    assert isinstance(trained.optimizer, torch.optim.AdamW)
    group = storage_group(build_mesh(plan.mesh_axes, "cuda"))
    live = state_tensors(trained.decoder, trained.optimizer)
    writer = CheckpointWriter(live, group, pins=True)
    architecture = model.model_dump(mode="json")
    for step in (1, 2):  # the second time into the first one's memory
        trained.step(micro_batches(step, 1, 64))
        kept = {name: held_tensor(tensor).clone() for name, tensor in live.all.items()}
        save = writer.save(
            tmp_path,
            live,
            progress=progress_at(step),
            meta=meta_at(step, architecture),
            model_files={},
            policy=CheckpointConfig(keep_last=2),
            in_background=True,
        )
        for tensor in live.all.values():
            held_tensor(tensor).zero_()
        load_checkpoint(save.result().path, live, architecture=architecture)
        for name, tensor in live.all.items():
            assert torch.equal(held_tensor(tensor), kept[name]), (step, name)
