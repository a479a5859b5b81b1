"""bf16 products taken in fp32 are bf16 products."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from herder.model.linear import Linear, _WideProduct


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_wide_product_and_its_gradients_are_within_a_rounding_of_exact_ones(weight_dtype):
    generator = torch.Generator().manual_seed(0)
    x_TI = torch.randn(20, 64, generator=generator).bfloat16().requires_grad_()
    weight_OI = torch.randn(48, 64, generator=generator).to(weight_dtype).requires_grad_()
    bias_O = torch.randn(48, generator=generator).to(weight_dtype).requires_grad_()
    upstream = torch.randn(20, 48, generator=generator).bfloat16()
    leaves = (x_TI, weight_OI, bias_O)
    wide = _WideProduct.apply(*leaves)
    exact = F.linear(*(leaf.double() for leaf in leaves))
    grads = torch.autograd.grad(wide, leaves, upstream)
    exact_grads = torch.autograd.grad(exact, leaves, upstream.double())
    assert wide.dtype == torch.bfloat16
    for actual, expected in zip([wide, *grads], [exact, *exact_grads], strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=2**-8, atol=2**-8)


def test_a_linear_layer_in_bf16_gives_bf16_whatever_the_processor():
    layer = Linear(64, 48, axes=("heads", "embed"), bias=True, device="cpu", dtype=torch.float32)
    x_TI = torch.randn(20, 64)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x_TI)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x_TI), rtol=0.05, atol=0.05)
    half = layer.bfloat16()
    assert half(x_TI.bfloat16()).dtype == half(x_TI[:1].bfloat16()).dtype == torch.bfloat16
