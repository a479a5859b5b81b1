"""Quantizing while loading: which matrices, to the numbers they would have afterwards, in how much
memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from herder.checkpoint.huggingface import load_decoder, save_huggingface
from herder.checkpoint.quantizing import is_quantized, load_quantized
from herder.checkpoint.source import resolve_model
from herder.cli.main import run
from herder.config.quantization import WeightQuantization
from herder.errors import WeightsError
from herder.model.attend import PackedAttend
from herder.model.decoder import Decoder
from herder.model.quantized_weight import QuantizedWeight, quantized
from herder.parallel.ranks import run_on_ranks

MakeDecoder = Callable[..., Decoder]
INT4 = WeightQuantization("int4", 32)
MADE = {"dtype": torch.float32, "device": "cpu"}


def logits(decoder: Decoder) -> torch.Tensor:
    tokens_T = torch.arange(24) % decoder.config.vocab_size
    with torch.no_grad():
        return decoder(tokens_T, positions_T=torch.arange(24), attend=PackedAttend([24]))


def put_together(decoder: Decoder) -> None:
    """Gives a quantized decoder the wide matrices that its own stand for."""
    for module in decoder.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, QuantizedWeight):
            setattr(module, "weight", nn.Parameter(weight.wide(torch.float32)))  # noqa: B010


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("how", [INT4, WeightQuantization("int8", 64)], ids=str)
def test_layers_are_quantized_and_compute_what_their_numbers_do(
    family: str, how: WeightQuantization, make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    save_huggingface(make_decoder(family), tmp_path / "tiny", family=family)
    source = resolve_model(str(tmp_path / "tiny"))
    wide, narrow = load_decoder(source, **MADE), load_quantized(source, how, **MADE)
    assert narrow.config.tie_embeddings == (narrow.head.weight is narrow.embed.weight)
    num_quantized = 0
    for name, module in narrow.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            before = wide.get_parameter(f"{name}.{leaf}")
            if leaf == "weight" and is_quantized(module):
                num_quantized += 1
                assert isinstance(parameter, QuantizedWeight)
                assert torch.equal(parameter, quantized(before, how)), name
            else:
                assert torch.equal(parameter, before), name
    assert num_quantized >= 7 * narrow.config.num_layers - 4
    buffers = dict(wide.named_buffers())
    assert all(torch.equal(each, buffers[name]) for name, each in narrow.named_buffers())
    found_TV = logits(narrow)
    put_together(narrow)
    torch.testing.assert_close(found_TV, logits(narrow), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_of_a_run_is_quantized_to_the_same(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    save_huggingface(make_decoder("qwen3_moe"), tmp_path / "tiny", family="qwen3_moe")
    vocabulary = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    tokenizer = {"version": "1.0", "model": vocabulary}
    (tmp_path / "tiny" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert run(["convert", str(tmp_path / "tiny"), str(tmp_path / "run")]) == 0
    sources = [resolve_model(str(tmp_path / name)) for name in ("tiny", "run")]
    assert sources[1].weights == "run"
    one, other = (load_quantized(source, INT4, **MADE).state_dict() for source in sources)
    assert one.keys() == other.keys()
    assert all(torch.equal(each, other[name]) for name, each in one.items())


def test_a_damaged_matrix_is_named(make_decoder: MakeDecoder, tmp_path: Path) -> None:
    save_huggingface(make_decoder("llama"), tmp_path / "tiny", family="llama")
    file = tmp_path / "tiny" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"layers\.1\.feed_forward\.up\.weight cannot be quant"):
        load_quantized(resolve_model(str(tmp_path / "tiny")), INT4, **MADE)


def memory_bytes(name: str) -> int:
    found = re.search(rf"(?m)^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text())
    assert found, f"no {name} in /proc/self/status"
    return int(found[1]) * 1024


def peak_growth(small: str, folder: str) -> tuple[int, int]:
    """Of the process while it loads, which it has done before, and the bytes of the model."""
    load_quantized(resolve_model(small), INT4, dtype=torch.bfloat16, device="cpu")
    before = memory_bytes("VmRSS")
    decoder = load_quantized(resolve_model(folder), INT4, dtype=torch.bfloat16, device="cpu")
    return memory_bytes("VmHWM") - before, sum(each.nbytes for each in decoder.parameters())


def test_the_peak_is_the_quantized_model_and_a_few_of_its_matrices(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 10}
    decoder = make_decoder("llama", **sizes, num_attention_heads=8, head_dim=128).bfloat16()
    wide_bytes = sum(each.nbytes for each in decoder.parameters())
    save_huggingface(decoder, tmp_path / "large", family="llama")
    del decoder
    save_huggingface(make_decoder("llama"), tmp_path / "small", family="llama")
    folders = (str(tmp_path / name) for name in ("small", "large"))
    ((peak_bytes, narrow_bytes),) = run_on_ranks(peak_growth, 1, *folders)
    matrix_bytes = 2 * 1024 * 2048
    allowed_bytes = narrow_bytes + 5 * matrix_bytes + 40 * 2**20
    print(
        f"{peak_bytes / 1e6:.0f} MB, {allowed_bytes / 1e6:.0f} allowed, {wide_bytes / 1e6:.0f} wide"
    )
    assert allowed_bytes < wide_bytes, "this would not notice a wide model"
    assert peak_bytes < allowed_bytes
