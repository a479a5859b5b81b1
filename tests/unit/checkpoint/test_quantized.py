from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from herder.checkpoint.huggingface import load_decoder, save_huggingface, stored_dtype
from herder.checkpoint.quantized import logical_tensors, read_values
from herder.checkpoint.source import resolve_model
from herder.checkpoint.stored import read_header
from herder.errors import ModelError, WeightsError
from herder.families.quantization import read_quantization
from herder.model.decoder import Decoder

MakeDecoder = Callable[..., Decoder]
NAME = "model.layers.0.mlp.up_proj"
FP8 = torch.float8_e4m3fn
AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]


def fp8(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": [128, 128], **changes}


def compressed(kind: str, bits: int, told: str, **weights: Any) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": told, "config_groups": groups}


class Files:
    """Tensors in one file, read under a quantization_config."""

    def __init__(self, folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        path = folder / "model.safetensors"
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
        quantization = read_quantization({"quantization_config": config}, where="tiny")
        self.tensors = logical_tensors(read_header(path), quantization, where="tiny")

    def read(self, name: str = f"{NAME}.weight", dtype: torch.dtype = torch.float32) -> Tensor:
        values = read_values(self.tensors[name], dtype)
        assert values.shape == self.tensors[name].shape
        assert values.dtype == dtype
        return values


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def scales(*shape: int) -> Tensor:
    return random(*shape, seed=1).abs() + 0.1


def packed(values: Tensor, dim: int, *, bits: int = 4) -> Tensor:
    """Numbers into 32-bit words along a dim, the first in the lowest bits, zeros at the end."""
    rows = values.T.tolist() if dim == 0 else values.tolist()
    a_word = 32 // bits
    words = [
        [sum(n << bits * i for i, n in enumerate(row[at : at + a_word])) for at in places]
        for row in rows
        if (places := range(0, len(row), a_word))
    ]
    signed = torch.tensor([[n - (1 << 32) if n >> 31 else n for n in row] for row in words])
    signed = signed.to(torch.int32)
    return signed.T if dim == 0 else signed


def test_fp8_blocks_are_scaled_block_by_block_ragged_ends_included(tmp_path: Path) -> None:
    stored, scale = random(200, 144).to(FP8), scales(2, 2)
    files = Files(tmp_path, fp8(), {f"{NAME}.weight": stored, f"{NAME}.weight_scale_inv": scale})
    wanted = torch.empty(200, 144)
    for row in range(200):
        for block in range(2):
            at = slice(128 * block, 128 * (block + 1))
            wanted[row, at] = stored[row, at].float() * scale[row // 128, block]
    assert torch.equal(files.read(), wanted)
    assert torch.equal(files.read(dtype=torch.bfloat16), wanted.to(torch.bfloat16))


def test_fp8_blocks_give_what_transformers_makes_of_them(tmp_path: Path) -> None:
    names = (f"{NAME}.weight", f"{NAME}.weight_scale_inv")
    stored, scale = random(1280, 256).to(FP8), scales(10, 2)
    files = Files(tmp_path, fp8(), dict(zip(names, (stored, scale), strict=True)))
    theirs = Fp8Dequantize(None)._dequantize_one(stored, scale, output_dtype=torch.bfloat16)
    assert torch.equal(files.read(dtype=torch.bfloat16), theirs)


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [("tensor", (1,)), ("tensor", ()), ("channel", (24, 1)), ("group", (24, 4)), ("block", (3, 2))],
)
def test_compressed_fp8_is_scaled_by_tensor_channel_group_or_block(
    strategy: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    sizes = {"group": {"group_size": 8}, "block": {"block_structure": [8, 16]}}.get(strategy, {})
    config = compressed("float", 8, "float-quantized", strategy=strategy, **sizes)
    stored, scale = random(24, 32).to(FP8), scales(*shape).to(torch.bfloat16)
    files = Files(tmp_path, config, {f"{NAME}.weight": stored, f"{NAME}.weight_scale": scale})
    spread = scale.float().reshape(-1, scale.shape[-1] if len(shape) == 2 else 1)
    for dim, size in enumerate((24, 32)):
        spread = spread.repeat_interleave(size // spread.shape[dim], dim)
    assert torch.equal(files.read(), stored.float() * spread)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_integers_are_unpacked_moved_and_scaled(
    bits: int, symmetric: bool, tmp_path: Path
) -> None:
    outputs, inputs, group, half = 12, 40, 8, 1 << bits - 1
    config = compressed(
        "int", bits, "pack-quantized", strategy="group", group_size=group, symmetric=symmetric
    )
    values = integers(-half, half, outputs, inputs)
    scale = scales(outputs, inputs // group).to(torch.bfloat16)
    zero = integers(-half, half, outputs, inputs // group, seed=2)
    tensors = {
        f"{NAME}.weight_packed": packed(values + half, 1, bits=bits),
        f"{NAME}.weight_scale": scale,
        f"{NAME}.weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        tensors[f"{NAME}.weight_zero_point"] = packed(zero + half, 0, bits=bits)
    wanted = torch.empty(outputs, inputs)
    for row in range(outputs):
        for column in range(inputs):
            at = (row, column // group)
            moved = values[row, column] - (0 if symmetric else zero[at])
            wanted[row, column] = moved * scale[at].float()
    assert torch.equal(Files(tmp_path, config, tensors).read(), wanted)


def test_a_packed_row_that_does_not_fill_its_last_word_is_cut(tmp_path: Path) -> None:
    config = compressed("int", 4, "pack-quantized", strategy="channel")
    values, scale = integers(-8, 8, 5, 13), scales(5, 1)
    tensors = {
        f"{NAME}.weight_packed": packed(values + 8, 1),
        f"{NAME}.weight_scale": scale,
        f"{NAME}.weight_shape": torch.tensor([5, 13]),
    }
    assert torch.equal(Files(tmp_path, config, tensors).read(), values * scale)


def test_inputs_that_were_reordered_keep_the_scale_of_their_group(tmp_path: Path) -> None:
    config = compressed("int", 4, "pack-quantized", strategy="group", group_size=8)
    values, scale = integers(-8, 8, 6, 32), scales(6, 4)
    group = torch.randperm(32, generator=torch.Generator().manual_seed(3)).to(torch.int32) // 8
    tensors = {
        f"{NAME}.weight_packed": packed(values + 8, 1),
        f"{NAME}.weight_scale": scale,
        f"{NAME}.weight_shape": torch.tensor([6, 32]),
        f"{NAME}.weight_g_idx": group,
    }
    wanted = torch.stack([values[:, i] * scale[:, group[i]] for i in range(32)], dim=1)
    assert torch.equal(Files(tmp_path, config, tensors).read(), wanted)


def test_eight_bit_integers_are_scaled_by_channel(tmp_path: Path) -> None:
    config = compressed("int", 8, "int-quantized", strategy="channel")
    values, scale = integers(-128, 128, 8, 16).to(torch.int8), scales(8, 1)
    files = Files(tmp_path, config, {f"{NAME}.weight": values, f"{NAME}.weight_scale": scale})
    assert torch.equal(files.read(), values * scale)


@pytest.mark.parametrize(("version", "offset"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq_is_packed_along_inputs_and_its_first_version_stores_zeros_less_one(
    version: str, offset: int, tmp_path: Path
) -> None:
    inputs, outputs = 1088, 128
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": version}
    values, zero = integers(0, 16, inputs, outputs), integers(0, 15, inputs // 32, outputs)
    scale = scales(inputs // 32, outputs).to(torch.float16)
    group = (inputs - 1 - torch.arange(inputs, dtype=torch.int32)) // 32
    tensors = {
        f"{NAME}.qweight": packed(values, 0),
        f"{NAME}.qzeros": packed(zero, 1),
        f"{NAME}.scales": scale,
        f"{NAME}.g_idx": group,
    }
    wanted = (values - zero[group] - offset) * scale[group].float()
    assert torch.equal(Files(tmp_path, method, tensors).read(), wanted.T)


def test_awq_is_packed_along_outputs_in_an_order_of_its_own(tmp_path: Path) -> None:
    inputs, outputs = 64, 24
    method = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    values, zero = integers(0, 16, inputs, outputs), integers(0, 16, inputs // 16, outputs)
    scale = scales(inputs // 16, outputs).to(torch.float16)

    def shuffled(numbers: Tensor) -> Tensor:
        return numbers.unflatten(1, (-1, 8))[:, :, AWQ_PLACES].flatten(1)

    tensors = {
        f"{NAME}.qweight": packed(shuffled(values), 1),
        f"{NAME}.qzeros": packed(shuffled(zero), 1),
        f"{NAME}.scales": scale,
    }
    rows = torch.arange(inputs) // 16
    wanted = (values - zero[rows]) * scale[rows].float()
    assert torch.equal(Files(tmp_path, method, tensors).read(), wanted.T)


def test_mxfp4_experts_give_what_transformers_makes_of_them(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = integers(0, 256, 3, 48, 2, 16).to(torch.uint8)
    exponents = integers(110, 140, 3, 48, 2, seed=1).to(torch.uint8)
    bias = random(3, 48)
    files = Files(
        tmp_path,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        {f"{experts}_blocks": blocks, f"{experts}_scales": exponents, f"{experts}_bias": bias},
    )
    assert files.tensors.keys() == {experts, f"{experts}_bias"}
    theirs = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    assert torch.equal(files.read(experts), theirs)
    assert files.read(experts).shape == (3, 64, 48)
    assert torch.equal(files.read(f"{experts}_bias"), bias)


def test_what_was_measured_for_activations_and_cache_is_left_out(tmp_path: Path) -> None:
    tensors = {
        f"{NAME}.weight": random(8, 8).to(FP8),
        f"{NAME}.weight_scale": scales(1),
        f"{NAME}.input_scale": scales(1),
        "model.layers.0.self_attn.k_scale": scales(1),
        "model.norm.weight": random(8),
    }
    files = Files(tmp_path, fp8(weight_block_size=None), tensors)
    assert files.tensors.keys() == {f"{NAME}.weight", "model.norm.weight"}


def test_everything_that_does_not_fit_is_told_together(tmp_path: Path) -> None:
    layer, eight = "model.layers.0", random(8, 8).to(FP8)
    tensors = {
        f"{layer}.mlp.up_proj.weight": eight,
        f"{layer}.mlp.down_proj.weight_scale_inv": scales(1, 1),
        f"{layer}.mlp.gate_proj.weight": eight,
        f"{layer}.mlp.gate_proj.weight_scale_inv": scales(2, 1),
        f"{layer}.mlp.gate.weight": eight,
        f"{layer}.mlp.gate.weight_scale_inv": scales(1, 1),
        f"{layer}.self_attn.q_proj.weight": random(8, 8),
        f"{layer}.self_attn.q_proj.weight_scale_inv": scales(1, 1),
        f"{layer}.self_attn.sinks": eight,
    }
    with pytest.raises(WeightsError) as caught:
        Files(tmp_path, fp8(), tensors)
    message = str(caught.value)
    assert "tiny: 6 tensors cannot be read" in message
    for part in (
        "mlp.up_proj: config.json says fp8, which is scale and values",
        "the files hold weight F8_E4M3 [8, 8]",
        "mlp.down_proj: config.json says fp8",
        "mlp.gate_proj: scale is [2, 1], but [8, 8] in blocks of (128, 128) needs 1",
        "mlp.gate: config.json does not say it is quantized, but the files hold weight F8_E4M3",
        "self_attn.q_proj: config.json says fp8",
        "self_attn.sinks has dtype F8_E4M3",
    ):
        assert part in message


def quantize_folder(folder: Path, config: dict[str, Any], names: tuple[str, ...]) -> None:
    """Turns the matrices of some modules of a saved model into fp8 with one scale a block."""
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if any(part in each for part in names)]:
        weight = tensors.pop(name)
        rows, columns = (-(-size // 16) for size in weight.shape)
        scale = scales(rows, columns)
        tensors[name] = (weight * 4).to(FP8)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))


@pytest.fixture
def folder(make_decoder: MakeDecoder, tmp_path: Path) -> Path:
    decoder = make_decoder("llama").to(torch.bfloat16)
    save_huggingface(decoder, tmp_path / "tiny", family="llama")
    return tmp_path / "tiny"


def test_attention_that_is_kept_plain_is_untouched_beside_quantized_matrices(
    folder: Path, make_decoder: MakeDecoder
) -> None:
    ignored = [
        f"language_model.model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qkvo"
    ]
    config = fp8(weight_block_size=[16, 16], modules_to_not_convert=ignored)
    quantize_folder(folder, config, ("mlp",))
    source = resolve_model(str(folder))
    assert stored_dtype(source) == torch.bfloat16
    original = dict(make_decoder("llama").to(torch.bfloat16).named_parameters())
    loaded = dict(load_decoder(source, dtype=torch.bfloat16).named_parameters())
    files = load_file(folder / "model.safetensors")
    for name, parameter in loaded.items():
        assert parameter.dtype == torch.bfloat16
        if "feed_forward." not in name:
            assert torch.equal(parameter, original[name])
    stored = files["model.layers.1.mlp.down_proj.weight"].float()
    scale = files["model.layers.1.mlp.down_proj.weight_scale_inv"]
    spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
    wanted = stored * spread[: stored.shape[0], : stored.shape[1]]
    assert torch.equal(loaded["layers.1.feed_forward.down.weight"], wanted.to(torch.bfloat16))


def in_fp8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = (-(-size // 16) for size in weight.shape)
    stored, scale = (weight * 4).to(FP8), scales(rows, columns)
    spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
    plain = stored.float() * spread[: weight.shape[0], : weight.shape[1]]
    return {name: stored, f"{name}_scale_inv": scale}, plain


def in_int4(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scale = integers(-8, 8, *weight.shape), scales(len(weight), 1)
    parts = {
        f"{name}_packed": packed(values + 8, 1),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(weight.shape),
    }
    return parts, values * scale


def in_mxfp4(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    experts, inputs, outputs = weight.shape
    blocks = integers(0, 256, experts, outputs, inputs // 32, 16).to(torch.uint8)
    exponents = integers(120, 130, experts, outputs, inputs // 32).to(torch.uint8)
    plain = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    return {f"{name}_blocks": blocks, f"{name}_scales": exponents}, plain


FORMATS = {
    "fp8": (fp8(weight_block_size=[16, 16]), in_fp8, r".*_proj\.weight"),
    "int4": (compressed("int", 4, "pack-quantized", strategy="channel"), in_int4, r".*_proj.*t"),
    "mxfp4": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        in_mxfp4,
        r".*experts\.\w+_proj",
    ),
}


@pytest.mark.parametrize(
    ("family", "kind", "changes"),
    [
        ("deepseek_v3", "fp8", {}),
        ("qwen3_moe", "fp8", {}),
        ("qwen2_moe", "int4", {}),
        ("gpt_oss", "mxfp4", {"hidden_size": 64, "intermediate_size": 32}),
    ],
)
def test_a_quantized_mixture_of_experts_is_the_model_of_its_dequantized_weights(
    family: str, kind: str, changes: dict[str, Any], make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    config, quantize, pattern = FORMATS[kind]
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    for folder in (quantized, plain):
        save_huggingface(make_decoder(family, **changes), folder, family=family)
    tensors = load_file(plain / "model.safetensors")
    stored, dequantized = dict(tensors), dict(tensors)
    chosen = [name for name in tensors if re.fullmatch(pattern, name)]
    assert chosen
    for name in chosen:
        parts, dequantized[name] = quantize(name, stored.pop(name))
        stored |= parts
    save_file({n: t.contiguous() for n, t in stored.items()}, quantized / "model.safetensors")
    save_file({n: t.contiguous() for n, t in dequantized.items()}, plain / "model.safetensors")
    file = quantized / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    for dtype in (torch.float32, torch.bfloat16):
        ours, wanted = (
            load_decoder(resolve_model(str(folder)), dtype=dtype).state_dict()
            for folder in (quantized, plain)
        )
        for name, tensor in ours.items():
            assert torch.equal(tensor, wanted[name])
            assert tensor.dtype == (torch.float32 if ".router." in name else dtype)


def test_a_matrix_whose_scale_is_missing_stops_the_load(folder: Path) -> None:
    quantize_folder(folder, fp8(weight_block_size=[16, 16]), ("mlp", "self_attn"))
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj"):
        del tensors[f"{name}.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"2 tensors(.|\n)*up_proj: (.|\n)*o_proj: "):
        load_decoder(resolve_model(str(folder)))


def test_a_format_that_cannot_be_read_is_planned_but_not_loaded(folder: Path) -> None:
    quantize_folder(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True}, ())
    source = resolve_model(str(folder))
    assert source.architecture.num_layers == 2
    with pytest.raises(ModelError, match="'bitsandbytes'"):
        load_decoder(source)
