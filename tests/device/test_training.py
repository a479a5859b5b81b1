"""Training steps on one GPU: the CPU's losses, compiled and sharded, through nccl."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    MlpConfig,
    NormConfig,
    RopeConfig,
)
from herder.config.catalog import gpu
from herder.config.run import ClusterConfig, LayoutConfig, OptimizerConfig, TrainConfig
from herder.data.batch import MicroBatch
from herder.model.build import build_decoder, initialize_weights
from herder.parallel.apply import apply
from herder.parallel.collectives import gather_dims, gather_rows, scatter_sum
from herder.parallel.mesh import Rank, build_mesh, joined
from herder.parallel.shards import copy_part
from herder.plan.training import plan_training
from herder.train.optimizer import build_optimizer
from herder.train.step import StepSettings, train_step

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("default"),  # of kernels, which differ from GPU to GPU
]

TOKENS = 256
ARCHITECTURE = ArchitectureConfig(
    vocab_size=256,
    hidden_size=64,
    max_position_embeddings=TOKENS,
    norm=NormConfig(eps=1e-5),
    tie_embeddings=True,
    attention=GroupedQueryAttention(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, scale=0.25, sinks=True
    ),
    ropes=(RopeConfig(theta=1e4, rotary_dim=16),),
    mlp=MlpConfig(intermediate_size=128),
    layers=(LayerSpec(), LayerSpec(attention="sliding", window=40)) * 2,
    initializer_range=0.1,
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


def micro_batch(number: int) -> MicroBatch:
    tokens_T = torch.randint(0, 256, (TOKENS + 1,), generator=torch.Generator().manual_seed(number))
    lengths = (100 + number, TOKENS - 100 - number)
    return MicroBatch(
        tokens_T=tokens_T[:-1],
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        targets_T=tokens_T[1:],
        weights_T=torch.ones(TOKENS),
        real_T=torch.ones(TOKENS, dtype=torch.bool),
        document_lengths=lengths,
        first_token=number * TOKENS,
    )


def losses(
    device_type: str, precision: str, *, compiled: bool = False, zero_stage: int | None = None
) -> list[float]:
    """Of a few steps of two micro-batches; zero_stage: in the process group, sharded over it."""
    cluster = ClusterConfig(nodes=1, gpus_per_node=1, gpu=gpu("h100-80gb"))
    train = TrainConfig(
        sequence_length=TOKENS,
        micro_batch_size=1,
        global_batch_tokens=2 * TOKENS,
        precision="bf16" if precision == "bf16" else "fp32",
    )
    plan = plan_training(ARCHITECTURE, cluster, train, LayoutConfig())
    mesh = None
    if zero_stage is not None:
        layout = plan.layout.model_copy(update={"zero_stage": zero_stage})
        plan = plan.model_copy(update={"layout": layout})
        mesh = build_mesh(plan.mesh_axes, device_type)
    device = torch.device(device_type)
    decoder = build_decoder(ARCHITECTURE)
    parallel = apply(decoder, plan, mesh, device=device, compiled=compiled)
    initialize_weights(decoder, seed=0, place=copy_part)
    settings = StepSettings(
        device=device,
        precision=train.precision,
        loss_chunk_tokens=64,
        clip_norm=1.0,
        parallel=parallel,
    )
    optimizer = build_optimizer(decoder.named_parameters(), OptimizerConfig(epsilon=1e-5))
    steps = [[micro_batch(2 * step), micro_batch(2 * step + 1)] for step in range(4)]
    return [train_step(decoder, optimizer, batches, settings).loss for batches in steps]


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
