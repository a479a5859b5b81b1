"""Every attend computes the reference's attention, forward and backward."""

from dataclasses import replace

import pytest
import torch

from herder.model import blockwise_attention
from herder.model.attend import PackedAttend
from herder.model.attention_spec import AttentionSpec
from herder.model.blockwise_attention import attend_blocks, attend_blocks_backward
from tests.reference_attend import ReferenceAttend

SPECS = [
    AttentionSpec("full", 0, 0.3),
    AttentionSpec("sliding", 1, 0.3),
    AttentionSpec("sliding", 5, 0.3),
    AttentionSpec("chunked", 4, 0.3),
]
CAPPED = [replace(spec, logit_softcap=0.7) for spec in SPECS]
LENGTHS = [[1], [7, 7, 3, 12], [4, 4, 4], [1, 1, 30]]


def random_qkv(num_tokens: int, *, value_dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((6, 8), (2, 8), (2, value_dim))
    return [
        torch.randn(num_tokens, *shape, generator=generator, requires_grad=True) for shape in shapes
    ]


def random_sinks() -> torch.Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(5), requires_grad=True)


def attended_with_gradients(attend, inputs, spec, sinks_N=None):
    out = attend(*inputs, spec, sinks_N)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    leaves = inputs if sinks_N is None else [*inputs, sinks_N]
    return [out, *torch.autograd.grad(out, leaves, upstream)]


def assert_near_reference(lengths, inputs, spec, sinks_N=None):
    expected = attended_with_gradients(ReferenceAttend(lengths), inputs, spec, sinks_N)
    actual = attended_with_gradients(PackedAttend(lengths), inputs, spec, sinks_N)
    for wanted, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("spec", SPECS + CAPPED, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_attention_and_its_gradients_equal_the_reference(spec, lengths):
    assert_near_reference(lengths, random_qkv(sum(lengths)), spec)


@pytest.mark.parametrize("spec", SPECS + CAPPED, ids=str)
def test_sinks_and_their_gradients_equal_the_reference(spec):
    assert_near_reference([7, 7, 3, 12], random_qkv(29), spec, random_sinks())


@pytest.mark.parametrize("spec", [*SPECS, CAPPED[0]], ids=str)
@pytest.mark.parametrize("value_dim", [4, 12])
def test_values_may_be_narrower_or_wider_than_keys(spec, value_dim):
    inputs = random_qkv(29, value_dim=value_dim)
    assert_near_reference([7, 7, 3, 12], inputs, spec, random_sinks())


@pytest.mark.parametrize("spec", [*SPECS, *CAPPED], ids=str)
def test_attention_in_blocks_equals_attention_at_once(spec, monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK_QUERIES", 5)
    k, q, v = torch.randn(3, 2, 3, 23, 8, generator=torch.Generator().manual_seed(0))
    grad = torch.randn(2, 3, 23, 8, generator=torch.Generator().manual_seed(1))
    out, logsumexp = attend_blocks(q, k, v, spec)
    grads = attend_blocks_backward(grad, q, k, v, out, logsumexp, spec)
    q, k, v = (x.transpose(1, 2).flatten(0, 1).requires_grad_() for x in (q, k, v))
    expected = ReferenceAttend([23, 23])(q, k, v, spec)
    upstream = grad.transpose(1, 2).flatten(0, 1)
    expected = [expected, *torch.autograd.grad(expected, (q, k, v), upstream)]
    for wanted, got in zip(expected, (out, *grads), strict=True):
        torch.testing.assert_close(got.transpose(1, 2).flatten(0, 1), wanted, atol=2e-6, rtol=1e-5)


def test_a_sink_takes_its_share_and_a_cap_bounds_every_logit():
    q, k, v = (torch.ones(1, 1, 2) for _ in range(3))
    spec = AttentionSpec("full", 0, 100.0, logit_softcap=2.0)
    out = ReferenceAttend([1])(q, k, v, spec, torch.tensor([2.0]))
    torch.testing.assert_close(out, torch.full((1, 1, 2), 0.5))


@pytest.mark.parametrize("window", [1, 7, 8, 9])
def test_a_window_of_w_shows_w_keys_with_the_querys_own(window):
    positions = torch.arange(20)
    allowed = AttentionSpec("sliding", window, 1.0).allows(positions[:, None], positions)
    assert allowed.sum(1).tolist() == [min(q + 1, window) for q in range(20)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_first_visible_key_is_the_first_the_mask_allows(spec):
    keys = torch.arange(20)
    for position in range(20):
        allowed = spec.allows(torch.tensor(position), keys)
        assert spec.first_visible(position) == int(allowed.int().argmax())


def test_query_heads_read_neighbouring_key_value_heads():
    """Repeat-interleave, not tile: with 2 key-value heads the orders differ."""
    q, k, v = random_qkv(9)
    spec = SPECS[0]
    alone = PackedAttend([9])(q[:, 3:], k[:, 1:], v[:, 1:], spec)
    together = PackedAttend([9])(q, k, v, spec)
    torch.testing.assert_close(together[:, 3:], alone)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_custom_operator_keeps_its_contract_with_the_compiler(softcap, with_sinks):
    bounds = PackedAttend([7, 7, 3, 12]).bounds
    sinks_N = random_sinks() if with_sinks else None
    arguments = (*random_qkv(29, value_dim=6), sinks_N, bounds, "sliding", 5, 0.3, softcap)
    torch.library.opcheck(torch.ops.herder.packed_attention.default, arguments)


def test_the_length_of_each_tokens_document_is_known():
    assert PackedAttend([2, 3]).context_T().tolist() == [2, 2, 3, 3, 3]


@pytest.mark.parametrize("spec", [SPECS[2], CAPPED[2]], ids=str)
def test_packed_attention_in_bf16_keeps_its_dtype_and_stays_near_fp32(spec):
    lengths = [7, 7, 3]
    leaves = [*random_qkv(17), random_sinks()]
    exact = attended_with_gradients(PackedAttend(lengths), leaves[:3], spec, leaves[3])
    *low_qkv, low_sinks = (x.detach().bfloat16().requires_grad_() for x in leaves)
    low = attended_with_gradients(PackedAttend(lengths), low_qkv, spec, low_sinks)
    for expected, actual in zip(exact, low, strict=True):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.float(), expected, atol=0.06, rtol=0.05)
