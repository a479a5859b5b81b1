"""What a GGUF file's metadata says as a config.json, and how its tensors are called here.

Owns llama.cpp's architecture names and keys. Imports no torch: planning resolves files with it.
Llama-architecture files (Llama, Mistral, SmolLM2) store q and k with rows permuted for another
rope layout; Qwen files do not. Source: llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from herder.checkpoint.gguf_file import GgufFile
from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention
from herder.errors import ModelError, close_match
from herder.families.weights import EMBEDDING, HEAD, LAYER, WeightRule, WeightRules

FREQUENCY_FACTORS = "rope_freqs.weight"
"""One divisor a frequency: how Llama 3.1's rope scaling is stored."""


@dataclass(frozen=True)
class GgufArchitecture:
    """How one of llama.cpp's architectures is read."""

    family: str
    hf_class: str
    is_permuted: bool
    """Whether rows of q and k are in the order of interleaved rope."""
    default_theta: float = 10_000.0


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", is_permuted=True),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM", is_permuted=False),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM", is_permuted=False),
}

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
_SIZE_KEYS = (
    "block_count context_length embedding_length feed_forward_length vocab_size expert_count "
    "expert_used_count tensor_data_layout"
)
_NEEDED_KEYS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
_ATTENTION_KEYS = (
    "head_count head_count_kv layer_norm_rms_epsilon key_length value_length sliding_window causal"
)
_ROPE_KEYS = (
    "dimension_count freq_base scale_linear scaling.type scaling.factor scaling.finetuned "
    "scaling.original_context_length scaling.attn_factor scaling.yarn_beta_fast "
    "scaling.yarn_beta_slow"
)
_KEYS = frozenset(
    [
        *_SIZE_KEYS.split(),
        *(f"attention.{key}" for key in _ATTENTION_KEYS.split()),
        *(f"rope.{key}" for key in _ROPE_KEYS.split()),
    ]
)
"""Keys, after the architecture's name, that are read or known not to matter."""
IGNORABLE_TENSORS = (FREQUENCY_FACTORS, "blk.{layer}.attn_rot_embd.weight")
"""The first is read into the config, the second is a table older converters wrote."""


def gguf_rules(rules: WeightRules) -> WeightRules:
    """The family's rules with GGUF names in place of hub names."""
    return WeightRules(
        rules=tuple(WeightRule(_gguf_name(rule.ours), rule.ours) for rule in rules.rules),
        num_layers=rules.num_layers,
        tied=rules.tied,
        ignorable=IGNORABLE_TENSORS,
    )


def _gguf_name(ours: str) -> str:
    if LAYER not in ours:
        return _NAMES[ours]
    stem, kind = ours.removeprefix(f"layers.{LAYER}.").rsplit(".", 1)
    return f"blk.{LAYER}.{_NAMES[stem]}.{kind}"


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Raises ModelError for an architecture that cannot be read, mixtures of experts included."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: GGUF architecture {name!r} is not supported. "
            f"{close_match(str(name), ARCHITECTURES)}"
        )
    if file.metadata.get(f"{name}.expert_count"):
        raise ModelError(
            f"{file.path}: a mixture of experts ({name}.expert_count="
            f"{file.metadata[f'{name}.expert_count']}) in GGUF form is not supported. "
            "Take the model's Hugging Face folder."
        )
    return ARCHITECTURES[name]


def permuted_heads(file: GgufFile, architecture: ArchitectureConfig) -> dict[str, int]:
    """Heads of the projections whose rows pair neighbours, by the projection's name in the file."""
    if not architecture_of(file).is_permuted:
        return {}
    attention = architecture.attention
    assert isinstance(attention, GroupedQueryAttention), "GGUF families have grouped heads"
    return {"attn_q": attention.num_attention_heads, "attn_k": attention.num_key_value_heads}


def config_json(file: GgufFile, *, frequency_factors: tuple[float, ...] = ()) -> dict[str, Any]:
    """The config.json of the model in a GGUF file.

    frequency_factors: the contents of `rope_freqs.weight`, where the file has that tensor. Raises
    ModelError that names every key that is missing.
    """
    architecture = architecture_of(file)
    prefix = file.metadata["general.architecture"]

    def value(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{prefix}.{key}", default)

    _refuse_unreadable(file, prefix)
    num_heads = value("attention.head_count")
    head_dim = value("attention.key_length", value("embedding_length") // num_heads)
    has_layer_0 = file.tensors.keys()
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.family,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in has_layer_0,
        "rope_theta": float(value("rope.freq_base", architecture.default_theta)),
        "rope_scaling": _rope_scaling(file, value, frequency_factors, head_dim),
        **_token_ids(file.metadata),
    }
    if architecture.family == "llama":
        config["attention_bias"] = "blk.0.attn_output.bias" in has_layer_0
        config["mlp_bias"] = "blk.0.ffn_down.bias" in has_layer_0
    if architecture.family == "qwen3":
        config["attention_bias"] = "blk.0.attn_output.bias" in has_layer_0
    return config


def _refuse_unreadable(file: GgufFile, prefix: str) -> None:
    """Raises ModelError for what is missing, unknown, or cannot be expressed."""
    metadata = {
        key.removeprefix(f"{prefix}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{prefix}.")
    }
    missing = [f"{prefix}.{key}" for key in _NEEDED_KEYS if key not in metadata]
    missing += ["token_embd.weight"] if "token_embd.weight" not in file.tensors else []
    if missing:
        raise ModelError(f"{file.path}: this GGUF file lacks {', '.join(missing)}.")
    unknown = [f"{prefix}.{key}" for key in metadata if key not in _KEYS]
    if unknown:
        raise ModelError(
            f"{file.path}: {', '.join(unknown)}: no such key is known here, so it might change the "
            "computation. Take the model's Hugging Face folder."
        )
    width = metadata.get("attention.key_length")
    problems = {
        "sizes that differ from layer to layer": any(
            isinstance(metadata.get(key), list)
            for key in ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
        ),
        "keys and values of different widths": metadata.get("attention.value_length", width)
        != width,
        "a sliding window, of which a GGUF file does not say on which layers it is": bool(
            metadata.get("attention.sliding_window")
        ),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ModelError(
                f"{file.path} has {problem}: not supported. Take the model's Hugging Face folder."
            )


def _rope_scaling(
    file: GgufFile, value: Any, frequency_factors: tuple[float, ...], head_dim: int
) -> dict[str, Any] | None:
    rotary_dim = value("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise ModelError(
            f"{file.path}: rotates {rotary_dim} of {head_dim} dims a head, which is not supported."
        )
    if frequency_factors:
        return _from_frequency_factors(frequency_factors, value)
    kind = value("rope.scaling.type", "none")
    factor = value("rope.scaling.factor", value("rope.scale_linear", 1.0))
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        return _yarn(value, factor)
    if kind != "none":
        raise ModelError(f"{file.path}: rope scaling {kind!r} in a GGUF file is not supported.")
    return None


def _yarn(value: Any, factor: float) -> dict[str, Any]:
    """llama.cpp multiplies its own 0.1 ln(factor) + 1 by attn_factor."""
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": value(
            "rope.scaling.original_context_length", value("context_length")
        ),
        "beta_fast": value("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": value("rope.scaling.yarn_beta_slow", 1.0),
    }
    extra = value("rope.scaling.attn_factor", 1.0)
    if extra != 1.0:
        scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
    return scaling


def _from_frequency_factors(factors: tuple[float, ...], value: Any) -> dict[str, Any]:
    """Llama 3's scaling where the divisors are its; else the divisors as they are.

    LongRoPE with equal short and long factors divides each frequency by a number of its own.
    """
    theta = value("rope.freq_base", 10_000.0)
    for low, high, window in ((1.0, 4.0, 8192), (1.0, 1.0, 8192)):
        made = _llama3_factors(len(factors), theta, max(factors), low, high, window)
        if all(abs(a - b) <= 1e-4 * b for a, b in zip(factors, made, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": float(max(factors)),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": window,
            }
    return {
        "rope_type": "longrope",
        "short_factor": list(factors),
        "long_factor": list(factors),
        "attention_factor": 1.0,
        "original_max_position_embeddings": value("context_length"),
    }


def _llama3_factors(
    count: int, theta: float, factor: float, low: float, high: float, window: int
) -> list[float]:
    """Divisors of the frequencies. Source: meta-llama/llama-models, apply_scaling."""
    divisors = []
    for index in range(count):
        wavelength = 2 * math.pi * theta ** (index / count)
        if wavelength < window / high:
            divisors.append(1.0)
        elif wavelength > window / low:
            divisors.append(factor)
        else:
            smooth = (window / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def frequency_factors(file: GgufFile) -> tuple[float, ...]:
    """The contents of `rope_freqs.weight`, or nothing. Raises ModelError unless it is fp32."""
    tensor = file.tensors.get(FREQUENCY_FACTORS)
    if tensor is None:
        return ()
    if tensor.kind != "F32":
        raise ModelError(f"{file.path}: {FREQUENCY_FACTORS} is stored as {tensor.kind}, not F32.")
    with file.path.open("rb") as data:
        data.seek(tensor.start)
        return struct.unpack(f"<{tensor.num_bytes // 4}f", data.read(tensor.num_bytes))


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "padding_token_id"}
    found = {short: metadata.get(f"tokenizer.ggml.{key}") for short, key in names.items()}
    return {
        "bos_token_id": found["bos"],
        "eos_token_id": found["eos"],
        "pad_token_id": found["padding"],
    }


def eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that ends a text, a turn or a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(each for each in ids if each is not None))
