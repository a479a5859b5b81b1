"""What a GGUF file's metadata says as a config.json, and how its tensors are called here.

Owns llama.cpp's architecture names and keys. Imports no torch: planning resolves files with it.
Llama-architecture files (Llama, Mistral, SmolLM2) store q and k with rows permuted for another
rope layout; Qwen files do not. Source: llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from herder.checkpoint.gguf_file import GgufFile
from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention
from herder.errors import ModelError, close_match
from herder.families.weights import EMBEDDING, HEAD, LAYER, WeightRules

FREQUENCY_FACTORS = "rope_freqs.weight"
"""One divisor a frequency: how Llama 3.1's rope scaling is stored."""

IS_PERMUTED = {"llama": True, "qwen2": False, "qwen3": False}
"""Architecture, and family here -> whether rows of q and k are in the order of interleaved rope."""

_NAMES = {
    EMBEDDING: "token_embd.weight",
    HEAD: "output.weight",
    "norm.weight": "output_norm.weight",
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
}
_NEEDED_KEYS = (
    "block_count context_length embedding_length feed_forward_length attention.head_count "
    "attention.layer_norm_rms_epsilon"
)
_OTHER_KEYS = (
    "vocab_size expert_count expert_used_count tensor_data_layout attention.head_count_kv "
    "attention.key_length attention.value_length attention.sliding_window attention.causal "
    "rope.dimension_count rope.freq_base rope.scale_linear rope.scaling.type rope.scaling.factor "
    "rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.attn_factor "
    "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow"
)
"""Keys, after the architecture's name, that are read or known not to matter."""
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_WINDOW = 1.0, 4.0, 8192
"""What Llama 3.1 and 3.2 were published with; a file holds only what comes of it."""
IGNORABLE_TENSORS = (FREQUENCY_FACTORS, "blk.{layer}.attn_rot_embd.weight")
"""The first is read into the config, the second is a table older converters wrote."""


def gguf_rules(rules: WeightRules) -> WeightRules:
    """The family's rules with GGUF names in place of hub names."""
    renamed = tuple(replace(rule, hub=_gguf_name(rule.ours)) for rule in rules.rules)
    return replace(rules, rules=renamed, ignorable=IGNORABLE_TENSORS)


def _gguf_name(ours: str) -> str:
    if LAYER not in ours:
        return _NAMES[ours]
    stem, kind = ours.removeprefix(f"layers.{LAYER}.").rsplit(".", 1)
    return f"blk.{LAYER}.{_NAMES[stem]}.{kind}"


def permuted_heads(file: GgufFile, architecture: ArchitectureConfig) -> dict[str, int]:
    """Heads of the projections whose rows pair neighbours, by the projection's name in the file."""
    if not IS_PERMUTED[file.architecture]:
        return {}
    attention = architecture.attention
    assert isinstance(attention, GroupedQueryAttention), "GGUF families have grouped heads"
    return {"attn_q": attention.num_attention_heads, "attn_k": attention.num_key_value_heads}


def config_json(file: GgufFile) -> dict[str, Any]:
    """The config.json of the model in a GGUF file.

    Raises ModelError for an architecture that cannot be read, for keys that are missing or unknown
    (all of them named), and for what a config.json cannot express.
    """
    _refuse_unreadable(file)
    value, tensors = file.value, file.tensors
    num_heads = value("attention.head_count")
    head_dim = value("attention.key_length", value("embedding_length") // num_heads)
    config: dict[str, Any] = {
        "model_type": file.architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": value("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, head_dim),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{role}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if file.architecture in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_output.bias" in tensors
    if file.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
    return config


def _refuse_unreadable(file: GgufFile) -> None:
    name, value = file.architecture, file.value
    if name not in IS_PERMUTED:
        raise ModelError(
            f"{file.path}: GGUF architecture {name!r} is not supported. "
            f"{close_match(name, IS_PERMUTED)}"
        )
    missing = [f"{name}.{key}" for key in _NEEDED_KEYS.split() if value(key) is None]
    missing += {"token_embd.weight"} - file.tensors.keys()
    if missing:
        raise ModelError(f"{file.path}: this GGUF file lacks {', '.join(missing)}.")
    known = {f"{name}.{key}" for key in f"{_NEEDED_KEYS} {_OTHER_KEYS}".split()}
    unknown = [key for key in file.metadata if key.startswith(f"{name}.") and key not in known]
    sizes = [value(key) for key in ("feed_forward_length", "attention.head_count")]
    sizes.append(value("attention.head_count_kv"))
    width = value("attention.key_length")
    problems = {
        f"a mixture of experts (expert_count={value('expert_count')})": value("expert_count"),
        f"keys that are not known and might change the computation ({', '.join(unknown)})": unknown,
        "sizes that differ from layer to layer": any(isinstance(each, list) for each in sizes),
        f"attention.head_count={sizes[1]}": type(sizes[1]) is int and sizes[1] < 1,
        "keys and values of different widths": value("attention.value_length", width) != width,
        "a sliding window, of which it does not say on which layers it is": value(
            "attention.sliding_window"
        ),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ModelError(
                f"{file.path} has {problem}: not supported. Take the model's Hugging Face folder."
            )


def _rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    value = file.value
    rotary_dim = value("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise ModelError(
            f"{file.path}: rotates {rotary_dim} of {head_dim} dims a head, which is not supported."
        )
    if FREQUENCY_FACTORS in file.tensors:
        return _from_frequency_factors(file)
    kind = value("rope.scaling.type", "none")
    factor = value("rope.scaling.factor", value("rope.scale_linear", 1.0))
    if kind in ("linear", "none"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind != "yarn":
        raise ModelError(f"{file.path}: rope scaling {kind!r} in a GGUF file is not supported.")
    # llama.cpp multiplies its own 0.1 ln(factor) + 1 by attn_factor.
    attention_factor = value("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0)
    window = value("rope.scaling.original_context_length", value("context_length"))
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": window,
        "beta_fast": value("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": value("rope.scaling.yarn_beta_slow", 1.0),
        "attention_factor": attention_factor,
    }


def _from_frequency_factors(file: GgufFile) -> dict[str, Any]:
    """Llama 3's scaling where the divisors are its; else the divisors as they are.

    LongRoPE with equal short and long factors divides each frequency by a number of its own.
    """
    tensor = file.tensors[FREQUENCY_FACTORS]
    if tensor.kind != "F32":
        raise ModelError(f"{file.path}: {FREQUENCY_FACTORS} is stored as {tensor.kind}, not F32.")
    with file.path.open("rb") as data:
        data.seek(tensor.start)
        factors = struct.unpack(f"<{tensor.num_bytes // 4}f", data.read(tensor.num_bytes))
    made = _llama3_factors(len(factors), file.value("rope.freq_base", 10_000.0), max(factors))
    if all(abs(a - b) <= 1e-4 * b for a, b in zip(factors, made, strict=True)):
        return {
            "rope_type": "llama3",
            "factor": max(factors),
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_WINDOW,
        }
    return {
        "rope_type": "longrope",
        "short_factor": list(factors),
        "long_factor": list(factors),
        "attention_factor": 1.0,
        "original_max_position_embeddings": file.value("context_length"),
    }


def _llama3_factors(count: int, theta: float, factor: float) -> list[float]:
    """Divisors of the frequencies. Source: meta-llama/llama-models, apply_scaling."""
    divisors = []
    for index in range(count):
        turns = _LLAMA3_WINDOW / (2 * math.pi * theta ** (index / count))
        smooth = min(max((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that ends a text, a turn or a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(each for each in ids if each is not None))
