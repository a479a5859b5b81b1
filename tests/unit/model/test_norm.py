"""RMSNorm's written-out backward pass, and its variants."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from herder.config.architecture import NormConfig
from herder.model.norm import RmsNorm, rms


def norm(**fields) -> RmsNorm:
    layer = RmsNorm(
        8, NormConfig(eps=1e-3, **fields), axis="embed", device="cpu", dtype=torch.float64
    )
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    return layer


@pytest.mark.parametrize("fields", [{}, {"weight_offset": 1}, {"multiply_in_fp32": True}], ids=str)
def test_gradients_are_those_of_finite_differences(fields):
    layer = norm(**fields)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    torch.testing.assert_close(layer(x), rms(x, 1e-3) * (layer.weight + layer.weight_offset))
    assert torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(layer, {"weight": weight}, x),
        (x, layer.weight),
    )


def test_the_order_of_cast_and_weight_shows_in_bf16():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    after, before = norm().bfloat16(), norm(multiply_in_fp32=True).bfloat16()
    normed = rms(x.float(), 1e-3)
    assert torch.equal(after(x), normed.bfloat16() * after.weight)
    assert torch.equal(before(x), (normed * before.weight.float()).bfloat16())
    assert not torch.equal(after(x), before(x))


@pytest.mark.parametrize(
    ("theirs", "fields"),
    [
        (LlamaRMSNorm, {}),
        (GptOssRMSNorm, {"multiply_in_fp32": True}),
        (Gemma3RMSNorm, {"weight_offset": 1, "multiply_in_fp32": True}),
    ],
)
def test_bf16_results_are_those_of_transformers_to_the_bit(theirs, fields):
    layer, oracle = norm(**fields).bfloat16(), theirs(8, eps=1e-3).bfloat16()
    with torch.no_grad():
        layer.weight.mul_(0.01)  # beside Gemma's 1, too small for bf16 to keep
        oracle.weight.copy_(layer.weight)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = oracle(x)
    assert torch.equal(layer(x), wanted)
    with torch.no_grad():
        assert torch.equal(layer(x), wanted)


def test_only_the_input_and_one_number_a_row_are_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm()(torch.randn(5, 8, dtype=torch.float64, requires_grad=True))
    assert sorted(t.numel() for t in kept) == [5, 8, 40]
