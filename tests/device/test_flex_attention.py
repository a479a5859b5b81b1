"""Fused attention on a GPU: forward and backward of every kind of layer are the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from herder.config.architecture import LayerSpec
from herder.model import flex
from herder.model.attend import Attend, PackedAttend
from herder.model.attention_spec import AttentionSpec
from tests.reference_attend import ReferenceAttend

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("default"),  # of kernels, which differ from GPU to GPU
]

SPECS = [
    AttentionSpec("full", 0, 0.2),
    AttentionSpec("sliding", 100, 0.2),
    AttentionSpec("chunked", 90, 0.2),
]
CAPPED = [replace(spec, logit_softcap=0.7) for spec in SPECS]
LENGTHS = (70, 70, 30, 214, 128)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""fp32: sums in another order. bf16: its 8 bits, on values of about 1."""


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Each spec makes its own graphs, and there is a limit to them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves(dtype: torch.dtype, *, num_heads: int, value_dim: int) -> list[Tensor]:
    """q, k, v and sinks."""
    num_tokens, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    shapes = ((num_tokens, num_heads, 64), (num_tokens, 2, 64), (num_tokens, 2, value_dim))
    made = [torch.randn(shape, generator=generator) for shape in (*shapes, (num_heads,))]
    return [each.to("cuda", dtype).requires_grad_() for each in made]


def attended(
    attend: Attend, inputs: list[Tensor], spec: AttentionSpec, sinks: bool
) -> list[Tensor]:
    """The output and the gradients of all inputs, in fp32."""
    q, k, v, sinks_N = inputs
    out = attend(q, k, v, spec, sinks_N if sinks else None)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    used = inputs if sinks else inputs[:3]
    grads = torch.autograd.grad(out, used, upstream.to(out))
    return [each.float() for each in (out, *grads)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("spec", [*SPECS, *CAPPED], ids=str)
def test_forward_and_backward_equal_the_reference(
    spec: AttentionSpec, sinks: bool, dtype: torch.dtype
) -> None:
    inputs = leaves(dtype, num_heads=6, value_dim=64)
    exact = [each.detach().float().requires_grad_() for each in inputs]
    expected = attended(ReferenceAttend(LENGTHS, device="cuda"), exact, spec, sinks)
    actual = attended(PackedAttend(LENGTHS, device="cuda"), inputs, spec, sinks)
    for got, wanted in zip(actual, expected, strict=True):
        scale = max(1.0, float(wanted.detach().abs().max()))
        torch.testing.assert_close(got / scale, wanted / scale, atol=TOLERANCES[dtype], rtol=0)


def test_values_may_be_wider_than_keys_as_in_latent_attention() -> None:
    inputs = leaves(torch.float32, num_heads=2, value_dim=128)
    expected = attended(ReferenceAttend(LENGTHS, device="cuda"), inputs, SPECS[0], False)
    actual = attended(PackedAttend(LENGTHS, device="cuda"), inputs, SPECS[0], False)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=5e-5, rtol=1e-4)


def test_the_fused_kernel_is_the_one_that_runs_and_its_masks_are_made_once() -> None:
    assert flex.is_available(), "no Triton or no C compiler: attention falls back to slower kernels"
    layers = (LayerSpec(), LayerSpec(attention="sliding", window=100), LayerSpec())
    attend = PackedAttend(LENGTHS, device="cuda", layers=layers)
    made = dict(attend._masks)
    assert made.keys() == {("full", 0), ("sliding", 100)}
    inputs = leaves(torch.bfloat16, num_heads=6, value_dim=64)
    counters.clear()
    for spec in SPECS[:2]:
        attended(attend, inputs, spec, False)
    assert all(attend._masks[kind] is mask for kind, mask in made.items())
    assert counters["stats"]["unique_graphs"] >= 1


def test_a_window_over_a_long_document_takes_no_memory_of_its_square() -> None:
    num_tokens, spec = 65_536, AttentionSpec("sliding", 1_024, 0.2)
    attend = PackedAttend((num_tokens,), device="cuda")
    shape = (num_tokens, 2, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs = [each.requires_grad_() for each in (q, k, v)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(*inputs, spec).sum().backward()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < num_tokens**2 / 8, f"{taken:,} bytes"  # a bit for each pair is more than that
