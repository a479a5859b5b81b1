"""Training steps on one GPU: the CPU's losses, compiled and sharded, through nccl."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from herder.config.architecture import MlpConfig
from herder.parallel.collectives import gather_dims, gather_rows, scatter_sum
from herder.parallel.mesh import Rank, joined
from tests.tiny import micro_batches, plan_on_cpus, planned_trainer, tiny_model

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("default"),  # of kernels, which differ from GPU to GPU
]

TOKENS = 256
ARCHITECTURE = tiny_model(
    "dwdw",
    head_dim=16,
    attention={"sinks": True},
    vocab_size=256,
    max_position_embeddings=TOKENS,
    mlp=MlpConfig(intermediate_size=128),
)


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    """A process group of one rank, over nccl."""
    device = torch.device("cuda", 0)
    with joined(Rank(0, 1, 0), device, timeout_seconds=60, store=dist.HashStore()):
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def losses(
    device_type: str, precision: str, *, compiled: bool = False, zero_stage: int | None = None
) -> list[float]:
    """Of a few steps of two micro-batches; zero_stage: in the process group, sharded over it."""
    train = {"sequence_length": TOKENS, "global_batch_tokens": 2 * TOKENS, "precision": precision}
    plan = plan_on_cpus(ARCHITECTURE, **train)
    if zero_stage is not None:
        layout = plan.layout.model_copy(update={"zero_stage": zero_stage})
        plan = plan.model_copy(update={"layout": layout})
    in_a_group = zero_stage is not None
    run = planned_trainer(
        ARCHITECTURE, plan, device=device_type, compiled=compiled, in_a_group=in_a_group
    )
    return [run.step(micro_batches(step, 2, TOKENS)).loss for step in range(4)]


def test_a_gpu_has_the_losses_of_a_cpu() -> None:
    assert losses("cuda", "fp32") == pytest.approx(losses("cpu", "fp32"), rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_layers_have_the_losses_of_eager_ones_from_one_graph_a_kind(
    precision: str,
) -> None:
    eager = losses("cuda", precision)
    torch._dynamo.reset()  # eager layers compile their attention alone
    counters.clear()
    compiled = losses("cuda", precision, compiled=True)
    assert compiled == pytest.approx(eager, rel=1e-4 if precision == "fp32" else 1e-2)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_sharded_decoder_trains_through_nccl(zero_stage: int, compiled: bool) -> None:
    sharded = losses("cuda", "fp32", compiled=compiled, zero_stage=zero_stage)
    assert sharded == pytest.approx(losses("cuda", "fp32"), rel=1e-4)


@pytest.mark.usefixtures("alone_in_a_group")
def test_collectives_of_rows_run_through_nccl_with_their_gradients() -> None:
    group = dist.group.WORLD
    assert group is not None
    x = torch.randn(6, 4, device="cuda", requires_grad=True)
    for collective in (gather_rows, scatter_sum, gather_dims):
        (gradient,) = torch.autograd.grad(collective(x, group).sum(), x)
        assert torch.equal(collective(x, group), x)
        assert torch.equal(gradient, torch.ones_like(x))
