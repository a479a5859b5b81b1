"""What tests of training share: a tiny model, its plan, micro-batches, and steps over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import JsonValue
from torch.optim import Optimizer

from herder.checkpoint.metadata import ExperimentMeta, config_hash
from herder.checkpoint.run import DataPosition, Progress
from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    MlpConfig,
    MoeConfig,
    NormConfig,
    RopeConfig,
)
from herder.config.catalog import gpu
from herder.config.run import ClusterConfig, LayoutConfig, OptimizerConfig, TrainConfig
from herder.data.batch import MicroBatch
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.decoder import Decoder
from herder.parallel.apply import ONE_PROCESS, Parallel, apply
from herder.parallel.mesh import build_mesh
from herder.parallel.shards import copy_part
from herder.plan.training import TrainingPlan, plan_training
from herder.train.optimizer import build_optimizer
from herder.train.step import StepResult, StepSettings, train_step

VOCAB_SIZE = 62
LAYERS = {
    "d": LayerSpec(),
    "w": LayerSpec(attention="sliding", window=8),
    "m": LayerSpec(feed_forward="routed"),
}
MOE = MoeConfig(
    num_experts=4,
    num_experts_per_token=2,
    expert_intermediate_size=16,
    scoring="softmax",
    normalize_weights=True,
)
"""Given to a model where it has a routed layer."""
LLAMA_JSON: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
"""A published config of about the same sizes."""
HERDER_JSON = {
    **{key: value for key, value in LLAMA_JSON.items() if key != "architectures"},
    "model_type": "herder",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "dense_layers": "last 1",
    "router_correction_bias": True,
    "router_bias_update_rate": 0.01,
    "router_aux_loss_coef": 0.01,
}
"""One in our own words, with experts."""


def tiny_model(
    kinds: str = "dd", *, head_dim: int = 8, attention: dict[str, Any] | None = None, **changes: Any
) -> ArchitectureConfig:
    """One layer a letter of `kinds`: d dense, w dense with a window, m with experts.

    attention: more fields of that; changes: other fields than these.
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 4 * head_dim,
        "max_position_embeddings": 64,
        "norm": NormConfig(eps=1e-5),
        "tie_embeddings": True,
        "attention": GroupedQueryAttention(
            **{
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": head_dim,
                "scale": head_dim**-0.5,
                **(attention or {}),
            }
        ),
        "ropes": (RopeConfig(theta=1e4, rotary_dim=head_dim),),
        "mlp": MlpConfig(intermediate_size=48),
        "moe": MOE if "m" in kinds else None,
        "layers": tuple(LAYERS[kind] for kind in kinds),
        "initializer_range": 0.2,
    }
    return ArchitectureConfig(**{**fields, **changes})


def initialized(model: ArchitectureConfig, device: str = "cpu") -> Decoder:
    """The whole decoder, with the same weights at each call."""
    decoder = build_decoder(model)
    materialize(decoder, device=device)
    initialize_weights(decoder, seed=3)
    return decoder


def plan_on_cpus(
    model: ArchitectureConfig, num_ranks: int = 1, layout: Any = None, **train: Any
) -> TrainingPlan:
    """layout: a LayoutConfig or its fields; train: fields of a TrainConfig, else fp32 and one
    sequence a micro-batch.
    """
    if not isinstance(layout, LayoutConfig):
        layout = LayoutConfig(**(layout or {}))
    config = TrainConfig(**{"micro_batch_size": 1, "precision": "fp32", **train})
    return plan_training(model, cpus(num_ranks), config, layout)


def cpus(num_ranks: int) -> ClusterConfig:
    """This machine as so many ranks."""
    return ClusterConfig(nodes=1, gpus_per_node=num_ranks, gpu=gpu("cpu"))


def micro_batch(
    number: int,
    num_tokens: int,
    *,
    lengths: Sequence[int] = (),
    padding: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> MicroBatch:
    """Random tokens, the same for the same number; documents of these lengths, or one.

    padding: how many tokens at the end do not count.
    """
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, vocab_size, (num_tokens + 1,), generator=generator)
    lengths = tuple(lengths) or (num_tokens,)
    assert sum(lengths) == num_tokens, lengths
    is_real = torch.arange(num_tokens) < num_tokens - padding
    return MicroBatch(
        tokens_T=ids[:-1],
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        targets_T=ids[1:],
        weights_T=is_real.float(),
        real_T=is_real,
        document_lengths=lengths,
    )


def micro_batches(
    seed: int, count: int, num_tokens: int, *, pads: bool = False
) -> list[MicroBatch]:
    """Two documents each, of other lengths in each; `pads` cuts every second one short."""
    return [
        replace(
            micro_batch(
                100 * seed + index,
                num_tokens,
                lengths=(5 + index, num_tokens - 5 - index),
                padding=3 * (index % 2) if pads else 0,
            ),
            first_token=index * num_tokens,
        )
        for index in range(count)
    ]


@dataclass(frozen=True)
class Trainer:
    """A decoder in its layout with all that a step takes."""

    decoder: Decoder
    optimizer: Optimizer
    settings: StepSettings

    def step(self, batches: Sequence[MicroBatch]) -> StepResult:
        """One step on this rank's share of the batches of all ranks."""
        index, count = self.settings.parallel.data_shard
        return train_step(self.decoder, self.optimizer, batches[index::count], self.settings)


def planned_trainer(
    model: ArchitectureConfig,
    plan: TrainingPlan,
    *,
    device: str = "cpu",
    compiled: bool = False,
    in_a_group: bool | None = None,
    learning_rate: float = 3e-4,
) -> Trainer:
    """This rank's part of a run; in_a_group: whether ranks are joined, else read from the plan."""
    decoder = build_decoder(model)
    grouped = plan.layout.num_ranks > 1 if in_a_group is None else in_a_group
    mesh = build_mesh(plan.mesh_axes, device) if grouped else None
    parallel = apply(decoder, plan, mesh, device=torch.device(device), compiled=compiled)
    initialize_weights(decoder, seed=3, place=copy_part)
    return trainer(
        decoder,
        parallel,
        device=device,
        precision=plan.precision.compute,
        learning_rate=learning_rate,
    )


def trainer(
    decoder: Decoder,
    parallel: Parallel = ONE_PROCESS,
    *,
    device: str = "cpu",
    precision: Any = "fp32",
    learning_rate: float = 3e-4,
) -> Trainer:
    """AdamW with an epsilon that keeps rounding small, and the loss in chunks of 16 tokens."""
    config = OptimizerConfig(learning_rate=learning_rate, epsilon=1e-5)
    settings = StepSettings(
        device=torch.device(device),
        precision=precision,
        loss_chunk_tokens=16,
        clip_norm=1.0,
        parallel=parallel,
    )
    return Trainer(decoder, build_optimizer(decoder.named_parameters(), config), settings)


def progress_at(step: int) -> Progress:
    """What a checkpoint says of a run that did so many steps."""
    data = DataPosition(corpus="c", seed=0, step=step)
    return Progress(step=step, tokens=10 * step, data=data, schedule={"kind": "constant"})


def meta_at(
    step: int, architecture: Mapping[str, JsonValue], config: Mapping[str, JsonValue] | None = None
) -> ExperimentMeta:
    """And what it was made of; config: of the run."""
    return ExperimentMeta(
        model="tiny",
        family="llama",
        architecture=dict(architecture),
        config=dict(config or {}),
        config_hash=config_hash(config or {}),
        plan={},
        git_commit=None,
        versions={},
        step=step,
        unix_seconds=0.0,
    )
