"""What the planner says a layer keeps for its backward pass, against what autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    MlpConfig,
    MoeConfig,
    NormConfig,
    RopeConfig,
)
from herder.config.run import ClusterConfig, TrainConfig
from herder.model.attend import PackedAttend
from herder.model.build import build_decoder, materialize
from herder.model.routing import Routing
from herder.plan.candidate import Candidate, Request
from herder.plan.layout import make_layout
from herder.plan.memory import layer_bytes_per_token
from herder.plan.stages import ModelSizes

TOKENS = 64
GROUPED = GroupedQueryAttention(
    num_attention_heads=8, num_key_value_heads=2, head_dim=48, scale=0.15
)
LATENT = LatentAttention(
    num_attention_heads=8,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=40,
    qk_rope_head_dim=16,
    v_head_dim=32,
    scale=0.13,
)
MOE = MoeConfig(
    num_experts=8,
    num_experts_per_token=3,
    expert_intermediate_size=304,
    scoring="softmax",
    normalize_weights=True,
)
SHARED = MOE.model_copy(update={"shared_expert_intermediate_size": 640, "shared_expert_gate": True})
TOP_1 = MOE.model_copy(update={"num_experts_per_token": 1, "weight_on_input": True})
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "q and k norms": {"attention": GROUPED.model_copy(update={"qk_norm": "head"})},
    "branch norms": {"branch_norm": True},
    "latent": {"attention": LATENT},
    "latent, queries not": {"attention": LATENT.model_copy(update={"q_lora_rank": None})},
    "experts": {"moe": MOE},
    "shared expert": {"moe": SHARED},
    "weight on input": {"moe": TOP_1},
}


def architecture(num_layers: int, **fields: Any) -> ArchitectureConfig:
    attention = fields.pop("attention", GROUPED)
    rotary = 16 if isinstance(attention, LatentAttention) else attention.head_dim
    layer = LayerSpec(feed_forward="routed" if "moe" in fields else "dense")
    return ArchitectureConfig(
        vocab_size=64,
        hidden_size=512,
        max_position_embeddings=TOKENS,
        norm=NormConfig(eps=1e-6),
        tie_embeddings=False,
        attention=attention,
        ropes=(RopeConfig(theta=1e4, rotary_dim=rotary),),
        mlp=MlpConfig(intermediate_size=1200),
        layers=(layer,) * num_layers,
        **fields,
    )


def kept_bytes(config: ArchitectureConfig, dtype: torch.dtype, *, autocast: bool) -> int:
    """Bytes of what a forward pass keeps, beside the parameters."""
    decoder = build_decoder(config, dtype=dtype)
    materialize(decoder, device="cpu")
    for parameter in decoder.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    parameters = {each.untyped_storage().data_ptr() for each in decoder.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    attend = PackedAttend([TOKENS], routing=Routing(None))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        decoder(
            torch.arange(TOKENS) % 64,
            positions_T=torch.arange(TOKENS),
            attend=attend,
            readout=lambda x_TD, _: x_TD,
        )
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in parameters)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_keeps_what_the_planner_counts(kind: str, precision: str) -> None:
    fields = KINDS[kind]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    three, two = (
        kept_bytes(architecture(n, **fields), dtype, autocast=precision == "autocast")
        for n in (3, 2)
    )
    num_ranks, zero_stage = (8, 1) if precision == "bf16" else (1, 0)
    train = TrainConfig(sequence_length=TOKENS, precision="fp32" if precision == "fp32" else "bf16")
    config = architecture(1, **fields)
    layout = make_layout(tp=1, pp=1, dp=num_ranks, cp=1, ep=1, zero_stage=zero_stage)
    request = Request(ModelSizes(config), ClusterConfig(gpu="h100-80gb"), train)
    candidate = Candidate(request, layout, 1, 1, "none")
    planned = layer_bytes_per_token(candidate, config.layers[0])
    assert planned == pytest.approx((three - two) / TOKENS, rel=0.02)
