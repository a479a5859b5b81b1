"""Every attend computes the reference's attention, forward and backward."""

import pytest
import torch

from herder.model.attend import PackedAttend, ReferenceAttend
from herder.model.attention_spec import AttentionSpec
from herder.model.cache import first_visible

SPECS = [
    AttentionSpec("full", 0, 0.3),
    AttentionSpec("sliding", 1, 0.3),
    AttentionSpec("sliding", 5, 0.3),
    AttentionSpec("chunked", 4, 0.3),
]
LENGTHS = [[1], [7, 7, 3, 12], [4, 4, 4], [1, 1, 30]]


def random_qkv(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn(num_tokens, heads, 8, generator=generator, requires_grad=True)
        for heads in (6, 2, 2)
    ]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_attention_and_its_gradients_equal_the_reference(spec, lengths):
    qkv = random_qkv(sum(lengths))
    upstream = torch.randn(sum(lengths), 6, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for attend in (ReferenceAttend(lengths), PackedAttend(lengths)):
        out = attend(*qkv, spec)
        results.append([out, *torch.autograd.grad(out, qkv, upstream)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


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
        assert first_visible(spec, position) == int(allowed.int().argmax())


def test_query_heads_read_neighbouring_key_value_heads():
    """Repeat-interleave, not tile: with 2 key-value heads the orders differ."""
    q, k, v = random_qkv(9)
    spec = SPECS[0]
    alone = PackedAttend([9])(q[:, 3:], k[:, 1:], v[:, 1:], spec)
    together = PackedAttend([9])(q, k, v, spec)
    torch.testing.assert_close(together[:, 3:], alone)


def test_the_custom_operator_keeps_its_contract_with_the_compiler():
    q, k, v = random_qkv(29)
    bounds = PackedAttend([7, 7, 3, 12]).bounds
    arguments = (q, k, v, bounds, "sliding", 5, 0.3)
    torch.library.opcheck(torch.ops.herder.packed_attention.default, arguments)


def test_the_length_of_each_tokens_document_is_known():
    assert PackedAttend([2, 3]).context_T().tolist() == [2, 2, 3, 3, 3]


def test_packed_attention_in_bf16_keeps_its_dtype_and_stays_near_fp32():
    lengths = [7, 7, 3]
    qkv = random_qkv(17)
    exact = PackedAttend(lengths)(*qkv, SPECS[2])
    exact_grads = torch.autograd.grad(exact.sum(), qkv)
    low_qkv = [x.detach().bfloat16().requires_grad_() for x in qkv]
    low = PackedAttend(lengths)(*low_qkv, SPECS[2])
    low_grads = torch.autograd.grad(low.sum(), low_qkv)
    for expected, actual in zip([exact, *exact_grads], [low, *low_grads], strict=True):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.float(), expected, atol=0.06, rtol=0.05)
