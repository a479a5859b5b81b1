"""What nn.DataParallel takes of each device: the first one's excess, counted by hand."""

from __future__ import annotations

import pytest

from herder.config.architecture import MlpConfig
from herder.config.catalog import gpu
from herder.config.run import ClusterConfig, TrainConfig
from herder.errors import PlanError
from herder.plan.naive import SHOWN_DEVICES, describe_naive
from herder.plan.training import TrainingPlan, plan_training
from tests.tiny import tiny_model

ARCHITECTURE = tiny_model(
    head_dim=16,
    vocab_size=1_000,
    max_position_embeddings=512,
    mlp=MlpConfig(intermediate_size=128),
)
EIGHT = ClusterConfig(nodes=1, gpus_per_node=8, gpu="h100-80gb")
TRAIN = TrainConfig(
    sequence_length=256, micro_batch_size=2, global_batch_tokens=4_096, precision="fp32"
)


def naive_plan(cluster: ClusterConfig = EIGHT, train: TrainConfig = TRAIN) -> TrainingPlan:
    return plan_training(ARCHITECTURE, cluster, train, "naive")


def test_the_first_device_has_all_state_and_outputs_the_others_a_copy_and_its_gradient() -> None:
    plan = naive_plan()
    first, *others = plan.naive_devices
    assert len(others) == 7
    assert first.state == pytest.approx(16 * plan.parameters / 1e9, rel=1e-4)
    gathered = 2 * 8 * 512 * 64 * 4 / 1e9  # values and gradients of 8 micro-batches of 512 tokens
    assert first.outputs == pytest.approx(plan.memory_gb.logits + gathered)
    for other in others:
        assert other.state == pytest.approx(8 * plan.parameters / 1e9)
        assert other.outputs == 0
        assert other.activations == first.activations
        assert other.total < first.total


def test_it_is_one_process_whatever_the_cluster_has() -> None:
    plan = naive_plan()
    assert plan.layout.num_ranks == 1
    assert plan.num_micro_batches == 8
    assert plan.objective == "given"


def test_one_gpu_is_like_any_run_and_no_gpu_is_told_what_eight_would_hold() -> None:
    one = naive_plan(EIGHT.model_copy(update={"gpus_per_node": 1})).naive_devices
    assert [each.total for each in one] == pytest.approx([naive_plan().memory_gb.total])
    none = naive_plan(ClusterConfig(nodes=1, gpus_per_node=1, gpu=gpu("cpu"))).naive_devices
    assert len(none) == SHOWN_DEVICES


def test_the_table_has_a_line_for_the_first_and_one_for_those_alike() -> None:
    devices = naive_plan().naive_devices
    heading, first, others, ratio = describe_naive(devices)
    assert "on 8 devices" in heading
    assert first.split()[:2] == ["device", "0"]
    assert others.split()[:4] == ["device", "1", "to", "7"]
    assert f"{devices[0].total:.2f}" in first
    assert f"{devices[0].total / devices[1].total:.1f} x" in ratio


@pytest.mark.parametrize(
    ("train", "cluster", "told"),
    [
        ({"compile": True}, {}, "train.compile"),
        ({"recompute": "full"}, {}, "train.recompute=full"),
        ({}, {"nodes": 2}, "cluster.nodes"),
    ],
)
def test_what_copies_of_modules_cannot_do_is_refused_with_what_would_do(
    train: dict[str, object], cluster: dict[str, object], told: str
) -> None:
    with pytest.raises(PlanError, match=f"cannot do {told}.*layout=auto"):
        naive_plan(EIGHT.model_copy(update=cluster), TRAIN.model_copy(update=train))
