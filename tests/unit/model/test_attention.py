"""Each layer's attention equals transformers', on the inputs that transformers' own model gave it.

A tiny model of transformers' runs as it is, masks, tables and all; hooks keep what went into each
layer's attention and what came out. The decoder here, with those weights, is given the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    LinearScaling,
    MlpConfig,
    NormConfig,
    QueryTemperature,
    RopeConfig,
    YarnScaling,
)
from herder.model.attend import Attend, PackedAttend
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.cache import KvCache
from herder.model.decoder import Decoder
from tests.reference_attend import ReferenceAttend

TIGHT = {"atol": 1e-5, "rtol": 1e-5}
NUM_TOKENS = 29
CUTS = [[29], [28, 1], [3, 1, 1, 6, 1, 1, 16], [9, 20], [1] * 29]

OUR_NAMES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "q_norm": "query_norm",
    "k_norm": "key_norm",
    "q_a_proj": "query_down",
    "q_a_layernorm": "query_latent_norm",
    "q_b_proj": "query_up",
    "kv_a_proj_with_mqa": "key_value_down",
    "kv_a_layernorm": "key_value_latent_norm",
    "kv_b_proj": "key_value_up",
}


class Case(NamedTuple):
    """A model of transformers' and the record that should compute the same attention."""

    theirs: transformers.PreTrainedConfig
    ours: ArchitectureConfig


def record(**fields: Any) -> ArchitectureConfig:
    given = {
        "vocab_size": 64,
        "hidden_size": 32,
        "max_position_embeddings": 128,
        "norm": NormConfig(eps=0.1),
        "tie_embeddings": False,
        "mlp": MlpConfig(intermediate_size=48),
        "ropes": (RopeConfig(theta=100.0, rotary_dim=8),),
        "layers": (LayerSpec(), LayerSpec()),
    }
    return ArchitectureConfig(**{**given, **fields})


def shared(num_layers: int = 2, **fields: Any) -> dict[str, Any]:
    """What every config of transformers' says."""
    return {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 0.1,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "attn_implementation": "eager",
        **fields,
    }


def grouped(**fields: Any) -> GroupedQueryAttention:
    given = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "scale": 8**-0.5}
    return GroupedQueryAttention(**{**given, **fields})


def plain_rope(theta: float = 100.0) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def deepseek(version: int, *, rank: int | None, bias: bool, yarn: bool, halves: bool) -> Case:
    dims = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    rope, scaling, scale = plain_rope(), {}, 20**-0.5
    if yarn:
        ramp = {"beta_fast": 1.5, "beta_slow": 0.25, "original_max_position_embeddings": 16}
        mscales = {"mscale": 1.0, "mscale_all_dim": 0.7}
        rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, **ramp, **mscales}
        small, large = (0.1 * m * math.log(8.0) + 1 for m in (0.7, 1.0))
        scaling = {"scaling": YarnScaling(factor=8.0, attention_factor=large / small, **ramp)}
        scale *= small**2
    kind = {2: transformers.DeepseekV2Config, 3: transformers.DeepseekV3Config}[version]
    theirs = kind(
        **shared(num_key_value_heads=4, first_k_dense_replace=2, attention_bias=bias),
        **dims,
        q_lora_rank=rank,
        rope_parameters=rope,
        **({"rope_interleave": not halves} if version == 3 else {}),
    )
    ours = record(
        attention=LatentAttention(
            num_attention_heads=4, q_lora_rank=rank, bias=bias, scale=scale, **dims
        ),
        ropes=(RopeConfig(theta=100.0, rotary_dim=8, interleaved=not halves, **scaling),),
    )
    return Case(theirs, ours)


def gpt_oss() -> Case:
    theirs = transformers.GptOssConfig(
        **shared(num_key_value_heads=2, head_dim=8, sliding_window=5),
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters=plain_rope(),
    )
    attention = grouped(sinks=True, qkv_bias=True, output_bias=True)
    layers = (LayerSpec(attention="sliding", window=5), LayerSpec())
    return Case(theirs, record(attention=attention, layers=layers))


def gemma2() -> Case:
    theirs = transformers.Gemma2Config(
        **shared(num_key_value_heads=2, head_dim=8, sliding_window=5),
        query_pre_attn_scalar=11,
        attn_logit_softcapping=2.0,
        rope_parameters=plain_rope(),
    )
    layers = (LayerSpec(attention="sliding", window=5), LayerSpec())
    attention = grouped(scale=11**-0.5, logit_softcap=2.0)
    return Case(theirs, record(attention=attention, layers=layers))


def gemma3() -> Case:
    theirs = transformers.Gemma3TextConfig(
        **shared(3, num_key_value_heads=2, head_dim=8, sliding_window=5),
        query_pre_attn_scalar=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": plain_rope(20.0),
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        },
    )
    sliding = LayerSpec(attention="sliding", window=5, rope=1)
    ours = record(
        norm=NormConfig(eps=0.1, weight_offset=1, multiply_in_fp32=True),
        attention=grouped(scale=11**-0.5, qk_norm="head"),
        ropes=(
            RopeConfig(theta=500.0, rotary_dim=8, scaling=LinearScaling(factor=4.0)),
            RopeConfig(theta=20.0, rotary_dim=8),
        ),
        layers=(sliding, LayerSpec(), sliding),
    )
    return Case(theirs, ours)


def llama4(*, weightless: bool) -> Case:
    theirs = transformers.Llama4TextConfig(
        **shared(3, num_key_value_heads=2, head_dim=8, attention_chunk_size=7),
        intermediate_size_mlp=48,
        num_local_experts=2,
        no_rope_layers=[1, 0, 1],
        use_qk_norm=weightless,
        attn_temperature_tuning=True,
        floor_scale=4,
        attn_scale=0.5,
        rope_parameters=plain_rope(),
    )
    rotated = LayerSpec(attention="chunked", window=7)
    ours = record(
        attention=grouped(
            qk_norm="weightless" if weightless else "none",
            temperature=QueryTemperature(scale=0.5, floor_tokens=4, position_offset=1),
        ),
        ropes=(RopeConfig(theta=100.0, rotary_dim=8, interleaved=True),),
        layers=(rotated, LayerSpec(rope=None, temperature=True), rotated),
    )
    return Case(theirs, ours)


def ministral3() -> Case:
    theirs = transformers.Ministral3Config(
        **shared(num_key_value_heads=2, head_dim=8),
        rope_parameters={
            **plain_rope(),
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 4,
        },
    )
    temperature = QueryTemperature(scale=0.5, floor_tokens=4, position_offset=0)
    layers = (LayerSpec(temperature=True),) * 2
    return Case(theirs, record(attention=grouped(temperature=temperature), layers=layers))


def phi3() -> Case:
    theirs = transformers.Phi3Config(
        **shared(num_key_value_heads=2, sliding_window=5),
        rope_parameters={**plain_rope(), "partial_rotary_factor": 0.5},
    )
    ours = record(
        attention=grouped(),
        ropes=(RopeConfig(theta=100.0, rotary_dim=4),),
        layers=(LayerSpec(attention="sliding", window=5),) * 2,
    )
    return Case(theirs, ours)


CASES = {
    "deepseek v2 lite": deepseek(2, rank=None, bias=False, yarn=True, halves=False),
    "deepseek v2": deepseek(2, rank=14, bias=True, yarn=False, halves=False),
    "deepseek v3": deepseek(3, rank=14, bias=False, yarn=True, halves=False),
    "deepseek v3 halves": deepseek(3, rank=None, bias=True, yarn=False, halves=True),
    "gpt-oss": gpt_oss(),
    "gemma 2": gemma2(),
    "gemma 3": gemma3(),
    "llama 4 scout": llama4(weightless=True),
    "llama 4 maverick": llama4(weightless=False),
    "ministral 3": ministral3(),
    "phi 3": phi3(),
}
each_case = pytest.mark.parametrize("name", CASES)


class Pair(NamedTuple):
    theirs: nn.Module
    ours: Decoder


@cache
def pair(name: str) -> Pair:
    """Both models of a case, ours with the attention weights of theirs, all of them random."""
    case = CASES[name]
    torch.manual_seed(0)
    theirs = transformers.AutoModel.from_config(case.theirs).eval()
    ours = build_decoder(case.ours)
    materialize(ours, device="cpu")
    initialize_weights(ours, seed=0)
    for index, layer in enumerate(theirs.layers):
        for key, weight in layer.self_attn.named_parameters():
            if "norm" in key or key.endswith("bias"):
                nn.init.normal_(weight, 0.5, 0.3)
        ours.layers[str(index)].attention.load_state_dict(our_weights(layer.self_attn))
    return Pair(theirs.requires_grad_(False), ours)


def our_weights(attention: nn.Module) -> dict[str, Tensor]:
    weights = attention.state_dict()
    if "qkv_proj.weight" in weights:
        parts = weights.pop("qkv_proj.weight").split((32, 16, 16))
        weights |= {f"{part}_proj.weight": w for part, w in zip("qkv", parts, strict=True)}
    if "sinks" in weights:
        weights["sinks.weight"] = weights.pop("sinks")
    owners = {key: key.split(".")[0] for key in weights}
    return {key.replace(at, OUR_NAMES.get(at, at)): weights[key] for key, at in owners.items()}


class Passed(NamedTuple):
    """What went into one layer's attention and what came out."""

    x: Tensor
    out: Tensor


def watched(theirs: nn.Module, tokens_BT: Tensor, **given: Any) -> list[Passed]:
    """One forward of transformers' model, layer by layer."""
    passed: list[Passed] = []

    def keep(_: nn.Module, args: tuple, kwargs: dict[str, Any], out: tuple) -> None:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        passed.append(Passed(x, out[0]))

    hooks = [
        layer.self_attn.register_forward_hook(keep, with_kwargs=True) for layer in theirs.layers
    ]
    theirs(tokens_BT, use_cache=False, **given)
    for hook in hooks:
        hook.remove()
    return passed


def attended(
    decoder: Decoder, given: Sequence[Tensor], positions_T: Tensor, attend: Attend
) -> list[Tensor]:
    """What each layer's attention makes of its given_TD, in one forward of the whole decoder."""
    outs: list[Tensor] = []
    hooks = []
    for x_TD, layer in zip(given, decoder.layers.values(), strict=True):
        attention = layer.attention
        hooks.append(
            attention.register_forward_pre_hook(lambda _, args, x_TD=x_TD: (x_TD, *args[1:]))
        )
        hooks.append(attention.register_forward_hook(lambda _, __, out: outs.append(out)))
    decoder(torch.zeros_like(positions_T), positions_T=positions_T, attend=attend)
    for hook in hooks:
        hook.remove()
    return outs


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_equal_layers(outs: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for out_TD, wanted_TD in zip(outs, wanted, strict=True):
        assert wanted_TD.std() > 0.1, "nothing to compare"
        torch.testing.assert_close(out_TD, wanted_TD, **TIGHT)


@each_case
@pytest.mark.parametrize("attend", [ReferenceAttend, PackedAttend])
@torch.no_grad()
def test_packed_documents_are_attended_as_transformers_does_one_by_one(name, attend):
    theirs, ours = pair(name)
    lengths = [17, NUM_TOKENS, 6]
    documents = [watched(theirs, random_tokens(1, length)) for length in lengths]
    layers = list(zip(*documents, strict=True))
    given = [torch.cat([passed.x[0] for passed in layer]) for layer in layers]
    wanted = [torch.cat([passed.out[0] for passed in layer]) for layer in layers]
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    assert_equal_layers(attended(ours, given, positions_T, attend(lengths)), wanted)


@each_case
@torch.no_grad()
def test_left_padding_in_transformers_is_no_padding_here(name):
    """Llama 4's temperature counts pads in transformers, so those of its layers are left out."""
    theirs, ours = pair(name)
    tokens_BT = random_tokens(1, NUM_TOKENS)
    real_BT = (torch.arange(NUM_TOKENS) >= 5)[None]
    positions_T = torch.arange(NUM_TOKENS - 5)
    position_ids = torch.cat((torch.zeros(5, dtype=torch.int64), positions_T))[None]
    passed = watched(theirs, tokens_BT, attention_mask=real_BT.long(), position_ids=position_ids)
    attend = ReferenceAttend([NUM_TOKENS - 5])
    outs = attended(ours, [layer.x[0, 5:] for layer in passed], positions_T, attend)
    counts_pads = name.startswith("llama 4")
    for spec, out_TD, layer in zip(ours.config.layers, outs, passed, strict=True):
        if not (counts_pads and spec.temperature):
            torch.testing.assert_close(out_TD, layer.out[0, 5:], **TIGHT)


@each_case
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@torch.no_grad()
def test_cached_attention_equals_transformers_whole_forward(name, cuts):
    """Cuts fall within windows and chunks, at their ends, and across them."""
    theirs, ours = pair(name)
    passed = watched(theirs, random_tokens(1, NUM_TOKENS))
    cache = KvCache(ours.config, num_tokens=32, dtype=torch.float32)
    pieces = []
    for count in cuts:
        given = [layer.x[0, cache.length : cache.length + count] for layer in passed]
        pieces.append(attended(ours, given, cache.positions_T(count), cache.attend(count)))
        cache.advance(count)
    outs = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    assert_equal_layers(outs, [layer.out[0] for layer in passed])


@each_case
def test_gradients_of_packed_attention_equal_the_references(name):
    ours = pair(name).ours
    lengths = [9, 9, 4, 1]
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    x_TD = torch.randn(23, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    results = []
    for attend in (ReferenceAttend(lengths), PackedAttend(lengths)):
        outs = torch.stack(attended(ours, [x_TD] * len(ours.layers), positions_T, attend))
        parameters = [p for layer in ours.layers.values() for p in layer.attention.parameters()]
        upstream = torch.randn(outs.shape, generator=torch.Generator().manual_seed(1))
        results.append(torch.autograd.grad(outs, [x_TD, *parameters], upstream))
    for wanted, got in zip(*results, strict=True):
        largest = wanted.abs().max()
        assert largest > 0.01, "nothing to compare"
        torch.testing.assert_close(got / largest, wanted / largest, **TIGHT)
