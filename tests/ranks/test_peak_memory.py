"""No rank ever allocates the whole model: the peak of a process is watched from outside torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from herder.config.architecture import MlpConfig
from herder.model.build import build_decoder, initialize_weights
from herder.parallel.apply import apply
from herder.parallel.mesh import build_mesh
from herder.parallel.ranks import run_on_ranks
from herder.parallel.shards import copy_part
from herder.plan.parameters import parameter_count
from herder.plan.training import TrainingPlan
from tests.tiny import plan_on_cpus, tiny_model

NUM_RANKS = 4
MODEL = tiny_model(
    "dddd",
    head_dim=128,
    attention={"num_attention_heads": 8, "num_key_value_heads": 4},
    vocab_size=2048,
    hidden_size=1024,
    tie_embeddings=False,
    mlp=MlpConfig(intermediate_size=2816),
)
WHOLE_BYTES = 4 * parameter_count(MODEL)
LARGEST_BYTES = 4 * 2816 * 1024
"""The largest parameter: its initial value is made whole, and then cut."""
SLACK_BYTES = 40 * 2**20
"""Of the interpreter, process groups, and what malloc keeps of freed tensors."""
LAYOUTS: dict[str, dict[str, int]] = {
    "ZeRO-1": {"zero_stage": 1},
    "ZeRO-3 in 2 copies": {"zero_stage": 3, "data_parallel_replicas": 2},
    "tensor": {"tensor_parallel_size": 4},
    "tensor and ZeRO-3": {"tensor_parallel_size": 2, "zero_stage": 3},
    "pipeline": {"pipeline_parallel_size": 4},
}


def memory_bytes(name: str) -> int:
    """VmRSS: resident now. VmHWM: the highest it ever was."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"(?m)^{name}:\s*(\d+) kB$", status)
    assert found, f"no {name} in /proc/self/status"
    return int(found[1]) * 1024


def peak_growth(plan: TrainingPlan, device: str) -> int:
    """Of a model that is built, laid out and initialized; of whole ones where it is not on meta."""
    before = memory_bytes("VmRSS")
    decoder, mesh = build_decoder(MODEL, device=device), build_mesh(plan.mesh_axes, "cpu")
    apply(decoder, plan, mesh, device=torch.device("cpu"))
    initialize_weights(decoder, seed=0, place=copy_part)
    return memory_bytes("VmHWM") - before


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_rank_ever_holds_more_than_its_share_and_one_parameter(name: str) -> None:
    plan = plan_on_cpus(MODEL, NUM_RANKS, LAYOUTS[name], sequence_length=64)
    assert plan.state_bytes.parameters < 0.6 * WHOLE_BYTES, "a share is all but the whole model"
    allowed = plan.state_bytes.parameters + 2 * LARGEST_BYTES + SLACK_BYTES
    assert allowed < WHOLE_BYTES, "this would not notice a whole model"
    peaks = run_on_ranks(peak_growth, NUM_RANKS, plan, "meta")
    print(name, [f"{peak / 1e6:.0f} of {allowed / 1e6:.0f} MB" for peak in peaks])
    assert max(peaks) < allowed


def test_a_rank_that_builds_the_whole_model_is_noticed() -> None:
    plan = plan_on_cpus(MODEL, NUM_RANKS, {"zero_stage": 1}, sequence_length=64)
    peaks = run_on_ranks(peak_growth, NUM_RANKS, plan, "cpu")
    print([f"{peak / 1e6:.0f} of {WHOLE_BYTES / 1e6:.0f} MB" for peak in peaks])
    assert min(peaks) > 0.9 * WHOLE_BYTES
