from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from herder.checkpoint.gguf_file import read_gguf
from herder.checkpoint.huggingface import load_decoder
from herder.checkpoint.source import resolve_model
from herder.checkpoint.stored import StoredTensor
from herder.checkpoint.tensors import halves_from_neighbours, read_tensor
from herder.model.attend import PackedAttend
from herder.model.decoder import Decoder

MakeDecoder = Callable[..., Decoder]
WriteGguf = Callable[..., Path]

QUANTIZABLE = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def logits(decoder: Decoder) -> Tensor:
    tokens_T = torch.arange(20) * 7 % 160
    return decoder(tokens_T, positions_T=torch.arange(20), attend=PackedAttend([20]))


@pytest.mark.parametrize(
    ("family", "architecture", "changes"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"tie_word_embeddings": True}),
        ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", "llama", {"num_key_value_heads": 1}),
        ("qwen2", "qwen2", {"use_sliding_window": False}),
        ("qwen3", "qwen3", {}),
    ],
)
def test_a_model_written_as_the_converter_does_comes_back_with_equal_weights_and_logits(
    family: str,
    architecture: str,
    changes: dict[str, Any],
    make_decoder: MakeDecoder,
    write_gguf: WriteGguf,
) -> None:
    decoder = make_decoder(family, **changes)
    path = write_gguf(decoder, architecture=architecture)
    loaded = load_decoder(resolve_model(str(path)))
    assert loaded.config == decoder.config.model_copy(update={"initializer_range": 0.02})
    wanted = dict(decoder.named_parameters())
    got = dict(loaded.named_parameters())
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert torch.equal(logits(loaded), logits(decoder))


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_quantized_matrices_come_back_as_their_blocks_say_with_rows_in_our_order(
    kind: str, make_decoder: MakeDecoder, write_gguf: WriteGguf
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    decoder = make_decoder("llama", **sizes)
    loaded = load_decoder(resolve_model(str(write_gguf(decoder, kind=kind))))
    quantization = gguf.GGMLQuantizationType[kind]
    for name, parameter in decoder.named_parameters():
        wanted = parameter.numpy()
        if wanted.ndim == 2:
            # Rows are quantized one by one, so it does not matter that the file permutes them.
            wanted = dequantize(quantize(wanted, quantization), quantization)
        np.testing.assert_array_equal(loaded.get_parameter(name).detach().numpy(), wanted, name)
    assert (logits(loaded) - logits(decoder)).abs().max() > 0


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_are_decoded_row_by_row(kind: str, tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    values, num_bytes = gguf.GGML_QUANT_SIZES[quantization]
    rows, blocks = 700, 2
    # Bytes below 60 keep the half-precision scales among them finite.
    raw = np.random.default_rng(0).integers(0, 60, (rows, blocks * num_bytes), dtype=np.uint8)
    path = tmp_path / "blocks"
    path.write_bytes(b"\0" * 32 + raw.tobytes())
    read = read_tensor(StoredTensor(path, kind, (rows, blocks * values), 32, raw.size)).numpy()
    wanted = np.stack([dequantize(row, quantization) for row in raw])
    np.testing.assert_array_equal(read, wanted)
    assert np.isfinite(wanted).all()
    assert wanted.std() > 0


def test_rows_are_put_in_order_by_head() -> None:
    weight_OI = torch.arange(48.0).reshape(12, 4)
    order = [0, 12, 4, 16, 8, 20, 24, 36, 28, 40, 32, 44]
    permuted = weight_OI[torch.tensor(order) // 4]
    assert torch.equal(halves_from_neighbours(permuted, num_heads=2), weight_OI)
    assert not torch.equal(halves_from_neighbours(permuted, num_heads=1), weight_OI)


@pytest.mark.package_data
def test_the_real_small_model_says_that_the_capital_of_france_is_paris(smollm2_gguf: Path) -> None:
    source = resolve_model(str(smollm2_gguf))
    decoder = load_decoder(source)
    vocabulary = read_gguf(smollm2_gguf).metadata["tokenizer.ggml.tokens"]
    ids = {token: index for index, token in enumerate(vocabulary)}
    asked = ["<|im_start|>", "user", "Ċ", "What", "Ġis", "Ġthe", "Ġcapital", "Ġof", "ĠFrance", "?"]
    answer = ["<|im_end|>", "Ċ", "<|im_start|>", "ass", "istant", "Ċ"]
    answer += ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    tokens_T = torch.tensor([ids[token] for token in asked + answer])
    length = len(tokens_T)
    with torch.inference_mode():
        logits_TV = decoder(
            tokens_T, positions_T=torch.arange(length), attend=PackedAttend([length])
        )
    assert vocabulary[int(logits_TV[-1].argmax())] == "ĠParis"
