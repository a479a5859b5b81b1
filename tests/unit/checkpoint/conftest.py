"""Tiny decoders with random weights, and GGUF files of them as llama.cpp's converter makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from numpy.typing import NDArray

from herder.config.architecture import GroupedQueryAttention
from herder.families.registry import families
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.decoder import Decoder

MakeDecoder = Callable[..., Decoder]
WriteGguf = Callable[..., Path]

NAMES = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
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
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefgh"]


@pytest.fixture
def make_decoder() -> MakeDecoder:
    """Builds a family's tiny model, with some keys of its config.json changed."""

    def make(family: str, **changes: Any) -> Decoder:
        config = {**families()[family].tiny_config(), **changes}
        decoder = build_decoder(families()[family].from_hf(config, family))
        materialize(decoder, device="cpu")
        initialize_weights(decoder, seed=0)
        return decoder.requires_grad_(False)

    return make


def gguf_name(ours: str) -> str:
    """What llama.cpp calls one of our parameters."""
    if ours in NAMES:
        return NAMES[ours]
    _, layer, rest = ours.split(".", 2)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[stem]}.{kind}"


def permute(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """What LlamaModel.permute of llama.cpp's converter does to q and k."""
    shape = weight.shape
    halves = weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return halves.swapaxes(1, 2).reshape(shape)


def gguf_arrays(decoder: Decoder, architecture: str) -> dict[str, NDArray[np.float32]]:
    """Our parameters under GGUF names, q and k permuted for the llama architecture."""
    attention = decoder.config.attention
    assert isinstance(attention, GroupedQueryAttention)
    heads = {"query": attention.num_attention_heads, "key": attention.num_key_value_heads}
    arrays = {}
    for ours, parameter in decoder.named_parameters():
        array = parameter.numpy()
        part = ours.split(".")[-2]
        if architecture == "llama" and part in heads:
            array = permute(array, heads[part])
        arrays[gguf_name(ours)] = np.ascontiguousarray(array)
    return arrays


def _metadata(decoder: Decoder, architecture: str) -> dict[str, Any]:
    config, attention, mlp = decoder.config, decoder.config.attention, decoder.config.mlp
    assert isinstance(attention, GroupedQueryAttention)
    assert mlp is not None
    own = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": mlp.intermediate_size,
        "attention.head_count": attention.num_attention_heads,
        "attention.head_count_kv": attention.num_key_value_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm.eps,
        "rope.freq_base": config.ropes[0].theta,
    }
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 8],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {**{f"{architecture}.{key}": value for key, value in own.items()}, **tokenizer}


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One metadata entry, typed as the converter types it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Writes a decoder as a GGUF file. `kind`: how matrices are stored; others stay fp32.

    `metadata` lays entries over the usual ones, None takes one away. `extra` adds fp32 tensors.
    """

    def write(
        decoder: Decoder,
        *,
        architecture: str = "llama",
        kind: str = "F32",
        metadata: Mapping[str, Any] | None = None,
        extra: Mapping[str, NDArray[np.float32]] | None = None,
    ) -> Path:
        path = tmp_path / f"{architecture}-{kind}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in {**_metadata(decoder, architecture), **(metadata or {})}.items():
            if value is not None:
                add_value(writer, key, value)
        for name, array in {**gguf_arrays(decoder, architecture), **(extra or {})}.items():
            if array.ndim == 1 or kind == "F32":
                writer.add_tensor(name, array)
            else:
                quantization = gguf.GGMLQuantizationType[kind]
                writer.add_tensor(name, quantize(array, quantization), raw_dtype=quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
