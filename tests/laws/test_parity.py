"""Law: the same logits as transformers, for every family and every way its configs can be written.

Families are found by discovery; the quirks below are what published and hand-made configs do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from herder.checkpoint.huggingface import load_decoder, save_huggingface
from herder.checkpoint.source import resolve_model
from herder.evaluate.parity import cached_difference, compare, packed_difference
from herder.evaluate.transformers_reference import made_by_transformers
from herder.families.registry import architecture_from_hf, families
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.cache import KvCache
from herder.model.decoder import Decoder

MakeModel = Callable[[Mapping[str, Any]], Path]

ABSENT = object()
"""As a value: the key is left out of the config.json."""


def scaled(kind: str, **fields: object) -> dict[str, Any]:
    """A legacy rope_scaling with `type`, on a theta small enough that scaling shows at once."""
    return {"rope_theta": 100.0, "rope_scaling": {"type": kind, **fields}}


def yarn(**fields: object) -> dict[str, Any]:
    """YaRN whose ramp has an inner region at these sizes."""
    given = {"factor": 4.0, "original_max_position_embeddings": 16, **fields}
    return {"max_position_embeddings": 64, **scaled("yarn", beta_fast=1.5, beta_slow=0.25, **given)}


def longrope(original: int, *, pairs: int = 4) -> dict[str, Any]:
    return {
        **scaled(
            "longrope",
            short_factor=[1.0 + index / 10 for index in range(pairs)],
            long_factor=[3.0 + index for index in range(pairs)],
            original_max_position_embeddings=original,
        )
    }


def llama3(low: float, high: float) -> dict[str, Any]:
    fields = {"factor": 8.0, "low_freq_factor": low, "high_freq_factor": high}
    section = {"rope_type": "llama3", "original_max_position_embeddings": 16, **fields}
    return {"rope_theta": 100.0, "rope_scaling": section}


def phi3_longrope(original: int) -> dict[str, Any]:
    """Half of a head of 16 rotates; the original window stands outside the section."""
    return {"original_max_position_embeddings": original, **longrope(original)}


QUIRKS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "past the window": {"max_position_embeddings": 16},
        "linear": scaled("linear", factor=3.0),
        "dynamic within the window": scaled("dynamic", factor=2.0),
        "dynamic past the window": {
            "max_position_embeddings": 16,
            **scaled("dynamic", factor=2.0),
        },
        "dynamic crossed while decoding": {
            "max_position_embeddings": 43,
            **scaled("dynamic", factor=4.0),
        },
        "dynamic crossed by some rows": {
            "max_position_embeddings": 36,
            **scaled("dynamic", factor=4.0),
        },
        "llama3": llama3(1.0, 4.0),
        "llama3 without a ramp": llama3(1.0, 1.0),
        "yarn": yarn(),
        "yarn not truncated": yarn(truncate=False),
        "yarn with its own attention factor": yarn(attention_factor=1.3),
        "yarn with two mscales": yarn(mscale=1.0, mscale_all_dim=0.5),
        "yarn without an original window": {
            "max_position_embeddings": 16,
            **scaled("yarn", factor=4.0),
        },
        "yarn with the original window outside": {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            **scaled("yarn", factor=4.0, beta_fast=1.5, beta_slow=0.25),
        },
        "longrope short": longrope(64),
        "longrope long": longrope(16),
        "longrope crossed while decoding": longrope(43),
        "longrope crossed by some rows": longrope(36),
        "one key-value head of odd many": {
            "hidden_size": 42,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
        },
        "no grouped heads": {"num_key_value_heads": None},
        "no theta": {"rope_theta": ABSENT},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "tied": {"tie_word_embeddings": True},
        "tanh gelu": {"hidden_act": "gelu_pytorch_tanh"},
        "partial rotation that is ignored": {"partial_rotary_factor": 0.5},
        "rope_parameters over rope_theta": {
            "rope_theta": 7.0,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
        },
        "rope_parameters beside rope_scaling": {
            "rope_theta": 700.0,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    },
    "mistral": {
        "no window": {"sliding_window": None},
        "window left out": {"sliding_window": ABSENT},
        "key-value heads left out": {"num_attention_heads": 8, "num_key_value_heads": ABSENT},
        "yarn": yarn(),
    },
    "qwen2": {
        "layer types": {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
        },
        "a window that is off": {"use_sliding_window": False},
        "a window on all layers": {"max_window_layers": 0},
        "dynamic past the window": {
            "max_position_embeddings": 16,
            **scaled("dynamic", factor=2.0),
        },
        "yarn and a window": yarn(),
    },
    "qwen3": {
        "biases": {"attention_bias": True},
        "heads of 128 by default": {"head_dim": ABSENT},
        "yarn and a window": {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            **yarn(),
        },
        "layer types": {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
    "ministral": {
        "a window on no layer": {"layer_types": ["full_attention"] * 2},
        "a window on all layers by default": {"layer_types": ABSENT},
    },
    "ministral3": {
        "a window": {"sliding_window": 8},
        "no scaling": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
            }
        },
    },
    "mixtral": {
        "a window": {"sliding_window": 8},
        "heads by default": {"head_dim": None},
        "one expert a token": {"num_experts_per_tok": 1},
        "all experts": {"num_experts_per_tok": 6},
        "tanh gelu and a theta by default": {
            "hidden_act": "gelu_pytorch_tanh",
            "rope_theta": ABSENT,
        },
        "yarn": yarn(),
    },
    "qwen2_moe": {
        "normalized": {"norm_topk_prob": True},
        "a window that is off": {"use_sliding_window": False, "sliding_window": 0},
        "layer types": {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]
        },
        "experts every second layer": {"mlp_only_layers": ABSENT, "decoder_sparse_step": 2},
        "dense throughout": {"mlp_only_layers": [0, 1, 2]},
        "no biases": {"qkv_bias": False},
        "gelu": {"hidden_act": "gelu"},
    },
    "qwen3_moe": {
        "not normalized": {"norm_topk_prob": False},
        "a window on all layers": {"use_sliding_window": True, "sliding_window": 8},
        "dense by list, experts counted as local, biases": {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0, 2],
            "num_experts": ABSENT,
            "num_local_experts": 6,
            "attention_bias": True,
        },
        "heads by default": {"head_dim": ABSENT},
    },
    "olmoe": {
        "not clipped, normalized": {"clip_qkv": None, "norm_topk_prob": True},
        "biases and no grouped heads": {"attention_bias": True, "num_key_value_heads": ABSENT},
    },
    "gpt_oss": {
        "yarn by default": {"rope_scaling": ABSENT, "rope_theta": ABSENT},
        "no scaling": {"rope_scaling": {"rope_type": "default"}},
        "layer types": {"layer_types": ["full_attention", "sliding_attention"]},
        "no attention biases": {"attention_bias": False},
        "another gain, one expert": {"swiglu_alpha": 0.7, "num_experts_per_tok": 1},
    },
    "llama4_text": {
        "no temperature": {"attn_temperature_tuning": False},
        "no norms": {"use_qk_norm": False},
        "experts in every layer, two a token": {
            "interleave_moe_layer_step": 1,
            "num_experts_per_tok": 2,
        },
        "layers by list": {
            "no_rope_layers": [0, 1, 0, 1],
            "moe_layers": [0, 3],
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
        "an empty list of layers without rope": {"no_rope_layers": []},
        "no chunks, another interval": {
            "attention_chunk_size": None,
            "no_rope_layer_interval": 2,
        },
        "llama3 without a ramp, biases": {**llama3(1.0, 1.0), "attention_bias": True},
    },
    "deepseek_v2": {
        "latent queries": {"q_lora_rank": 18},
        "groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        "a method that ignores its groups": {"n_group": 4, "topk_group": 1},
        "normalization that is ignored": {"norm_topk_prob": True, "routed_scaling_factor": 1.7},
        "yarn with mscales": yarn(mscale=0.707, mscale_all_dim=0.707),
        "yarn without mscales, biases": {**yarn(), "attention_bias": True},
        "experts in every layer": {"first_k_dense_replace": ABSENT},
    },
    "deepseek_v3": {
        "whole queries": {"q_lora_rank": None},
        "pairs of halves": {"rope_interleave": False},
        "not normalized, one group": {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        "no scaling, biases": {"rope_scaling": ABSENT, "attention_bias": True},
        "dense throughout by default": {"first_k_dense_replace": ABSENT},
        "one shared expert, another factor": {
            "n_shared_experts": 1,
            "routed_scaling_factor": 0.8,
        },
    },
    "smollm3": {
        "no window": {"use_sliding_window": False},
        "layers by list, biases": {
            "no_rope_layers": [0, 1, 1, 0],
            "attention_bias": True,
            "mlp_bias": True,
        },
        "another interval, not tied": {
            "no_rope_layer_interval": 2,
            "tie_word_embeddings": False,
        },
        "windows where layers rotate": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    },
    "phi3": {
        "whole heads and a window": {"partial_rotary_factor": ABSENT, "sliding_window": 8},
        "longrope short": phi3_longrope(64),
        "longrope long": phi3_longrope(16),
        "no grouped heads, tied": {"num_key_value_heads": ABSENT, "tie_word_embeddings": True},
    },
    "gemma2": {
        "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "caps and the scalar by default": {
            "attn_logit_softcapping": ABSENT,
            "final_logit_softcapping": ABSENT,
            "query_pre_attn_scalar": ABSENT,
        },
        "layer types, biases, not tied": {
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    },
    "gemma3_text": {
        "full layers scaled": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "tables by layer type": {
            "rope_local_base_freq": ABSENT,
            "rope_theta": ABSENT,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
            },
        },
        "a final cap": {"final_logit_softcapping": 3.0},
        "layer types": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    },
}

CASES = [
    pytest.param(family, changes, id=f"{family}: {name}")
    for family in families()
    for name, changes in {"as it is": {}, **QUIRKS.get(family, {})}.items()
]
each_family = pytest.mark.parametrize("family", families())


def config_of(family: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    config = {**families()[family].tiny_config(), **changes}
    return {key: value for key, value in config.items() if value is not ABSENT}


def random_decoder(family: str) -> Decoder:
    config = families()[family].tiny_config()
    decoder = build_decoder(families()[family].from_hf(config, family))
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=0)
    return decoder.requires_grad_(False)


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logits_layers_greedy_tokens_and_cache_equal_those_of_transformers(
    family: str, changes: dict[str, Any], transformers_folder: MakeModel
) -> None:
    source = resolve_model(str(transformers_folder(config_of(family, changes))))
    decoder = load_decoder(source)
    report = compare(decoder, made_by_transformers(source, decoder, seed=1))
    assert report.passed, report
    assert report.first_differing_layer is None


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"max_position_embeddings": 16, **scaled("dynamic", factor=2.0)}, id="dynamic"
        ),
        pytest.param(longrope(24), id="longrope"),
    ],
)
def test_cached_keys_keep_the_angles_they_were_written_with_as_in_transformers(
    changes: dict[str, Any], transformers_folder: MakeModel
) -> None:
    folder = transformers_folder(config_of("llama", changes))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decoder = load_decoder(resolve_model(str(folder)))
    tokens_T = torch.randint(0, 160, (32,), generator=torch.Generator().manual_seed(0))
    cache = KvCache(decoder.config, num_tokens=32, dtype=torch.float32)
    past = transformers.DynamicCache()
    own, wanted = list[Tensor](), list[Tensor]()
    with torch.inference_mode():
        for piece in (tokens_T[:20], *tokens_T[20:].split(1)):
            positions_T = cache.positions_T(len(piece))
            attend = cache.attend(len(piece))
            own.append(decoder(piece, positions_T=positions_T, attend=attend))
            cache.advance(len(piece))
            out = theirs(piece[None], position_ids=positions_T[None], cache=past)
            wanted.append(out.logits[0])
    assert (torch.cat(own) - torch.cat(wanted)).abs().max() < 1e-4
    whole = theirs(tokens_T[None]).logits[0]
    assert (whole - torch.cat(wanted)).abs().max() > 1e-2, "the angles did not change"


@each_family
def test_a_config_that_transformers_saved_again_says_the_same(family: str, tmp_path: Path) -> None:
    config = families()[family].tiny_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    again = json.loads((tmp_path / "config.json").read_text())
    assert again != config
    assert architecture_from_hf(again, name="again") == architecture_from_hf(config, name="tiny")


@each_family
def test_weights_that_come_in_and_go_out_are_the_same_tensors(
    family: str, transformers_folder: MakeModel, tmp_path: Path
) -> None:
    folder = transformers_folder(config_of(family, {}))
    source = resolve_model(str(folder))
    save_huggingface(load_decoder(source), tmp_path / "out", family=family, like=source)
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@each_family
def test_an_exported_model_gives_equal_logits_in_transformers(family: str, tmp_path: Path) -> None:
    decoder = random_decoder(family)
    save_huggingface(decoder, tmp_path / "out", family=family)
    source = resolve_model(str(tmp_path / "out"))
    assert source.architecture == decoder.config
    _, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert {name: list(names) for name, names in told.items() if names} == {}
    assert compare(decoder, made_by_transformers(source, decoder, seed=2)).passed


@each_family
def test_decoding_through_a_cache_equals_one_whole_forward(family: str) -> None:
    tokens_T = torch.randint(0, 160, (24,), generator=torch.Generator().manual_seed(0))
    assert cached_difference(random_decoder(family), tokens_T) < 1e-4


@each_family
def test_documents_packed_together_give_the_logits_of_each_alone(family: str) -> None:
    documents = list(torch.randint(0, 160, (40,)).split([17, 3, 20]))
    assert packed_difference(random_decoder(family), documents) < 1e-5
