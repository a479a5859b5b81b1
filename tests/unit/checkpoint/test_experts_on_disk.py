"""Routed experts between our stacked tensors and the hub's: dtypes, memory, what is told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from herder.checkpoint.huggingface import load_decoder, save_huggingface
from herder.checkpoint.source import resolve_model
from herder.errors import WeightsError
from herder.families.registry import families
from herder.model.decoder import Decoder
from herder.model.router import Router

MakeDecoder = Callable[..., Decoder]
ROUTED = [name for name, family in families().items() if "num_experts_per_tok" in family.tiny]


def routers(decoder: Decoder) -> list[Router]:
    return [module for module in decoder.modules() if isinstance(module, Router)]


@pytest.mark.parametrize("family", ROUTED)
def test_a_router_is_wide_in_memory_and_as_narrow_on_disk_as_loses_nothing(
    family: str, make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    save_huggingface(make_decoder(family), tmp_path / "wide", family=family)
    decoder = load_decoder(resolve_model(str(tmp_path / "wide")), dtype=torch.bfloat16)
    decoder.requires_grad_(False)
    rest = {p.dtype for n, p in decoder.named_parameters() if ".router." not in n}
    assert rest == {torch.bfloat16}
    assert {each.weight.dtype for each in routers(decoder)} == {torch.float32}
    save_huggingface(decoder, tmp_path / "as it is", family=family)
    kept = load_file(tmp_path / "as it is" / "model.safetensors")
    assert torch.float32 in {tensor.dtype for tensor in kept.values()}, "its weights were cut"
    for router in routers(decoder):
        router.weight.copy_(router.weight.bfloat16())
    save_huggingface(decoder, tmp_path / "narrow", family=family)
    narrow = load_file(tmp_path / "narrow" / "model.safetensors")
    wide = [name for name, tensor in narrow.items() if tensor.dtype == torch.float32]
    assert all(name.endswith("e_score_correction_bias") for name in wide)
    again = load_decoder(resolve_model(str(tmp_path / "narrow")), dtype=torch.bfloat16)
    state = decoder.state_dict()
    assert all(torch.equal(each, state[name]) for name, each in again.state_dict().items())


def test_a_correction_bias_is_loaded_in_fp32_and_stays_a_buffer(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    decoder = make_decoder("deepseek_v3")
    values = torch.linspace(-0.3, 0.4, 8)
    for router in routers(decoder):
        router.correction_bias.copy_(values)
    save_huggingface(decoder, tmp_path / "out", family="deepseek_v3")
    loaded = load_decoder(resolve_model(str(tmp_path / "out")), dtype=torch.bfloat16)
    for router in routers(loaded):
        assert torch.equal(router.correction_bias, values)
        assert not isinstance(router.correction_bias, torch.nn.Parameter)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4_text", "phi3"])
def test_shards_with_an_index_hold_each_tensor_once_and_load_back(
    family: str, make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    decoder = make_decoder(family)
    save_huggingface(decoder, tmp_path / "one", family=family)
    save_huggingface(decoder, tmp_path / "cut", family=family, shard_bytes=30_000)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "one" / "model.safetensors")
    held = {}
    for path in (tmp_path / "cut").glob("*.safetensors"):
        shard = load_file(path)
        assert {index["weight_map"][name] for name in shard} == {path.name}
        held |= shard
    assert held.keys() == index["weight_map"].keys() == whole.keys()
    assert all(torch.equal(held[name], whole[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in held.values())
    loaded = load_decoder(resolve_model(str(tmp_path / "cut"))).state_dict()
    assert all(torch.equal(each, loaded[name]) for name, each in decoder.state_dict().items())


def test_missing_and_misshapen_experts_are_told_by_their_hub_names(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    save_huggingface(make_decoder("mixtral"), tmp_path / "out", family="mixtral")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    block = "model.layers.1.block_sparse_moe.experts"
    del tensors[f"{block}.4.w3.weight"]
    tensors[f"{block}.2.w2.weight"] = tensors[f"{block}.2.w2.weight"].T.contiguous()
    tensors[f"{block}.6.w1.weight"] = tensors[f"{block}.5.w1.weight"].clone()
    save_file(tensors, path)
    with pytest.raises(WeightsError) as caught:
        load_decoder(resolve_model(str(tmp_path / "out")))
    for part in (
        f"1 missing: {block}.4.w3.weight",
        f"1 that the architecture does not have: {block}.6.w1.weight",
        f"{block}.2.w2.weight is [88, 40], the architecture needs [40, 88]",
    ):
        assert part in str(caught.value)


def test_a_fused_tensor_of_another_size_is_told_with_the_size_it_needs(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    save_huggingface(make_decoder("phi3"), tmp_path / "out", family="phi3")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][:-16].clone()
    save_file(tensors, path)
    told = f"{name} is [112, 64], the architecture needs [128, 64]"
    with pytest.raises(WeightsError, match=re.escape(told)):
        load_decoder(resolve_model(str(tmp_path / "out")))


def test_the_layer_that_predicts_further_tokens_is_passed_over_by_its_number(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    decoder = make_decoder("deepseek_v3")
    save_huggingface(decoder, tmp_path / "out", family="deepseek_v3")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(40, 80)
    save_file(tensors, path)
    loaded = load_decoder(resolve_model(str(tmp_path / "out"))).state_dict()
    assert all(torch.equal(each, loaded[name]) for name, each in decoder.state_dict().items())
    tensors["model.layers.4.eh_proj.weight"] = torch.ones(40, 80)
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=r"does not have: model\.layers\.4\.eh_proj"):
        load_decoder(resolve_model(str(tmp_path / "out")))
