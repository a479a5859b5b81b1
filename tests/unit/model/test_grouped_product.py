"""One product per expert that has rows, forward and backward, whatever the counts are."""

import pytest
import torch
from torch import Tensor

from herder.model import grouped_product as module
from herder.model.grouped_product import grouped_product

COUNTS = {
    "all experts have rows": [3, 1, 4],
    "one has none": [5, 0, 3],
    "one has all": [0, 8, 0],
    "rows that belong to nobody": [2, 0, 3],
    "nobody has any": [0, 0, 0],
}


def make(dtype: torch.dtype = torch.float64, *, num_rows: int = 8) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, 8), (3, 16, 8), (3, 16))
    return tuple(torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)


def plain(rows: Tensor, counts: list[int], weight: Tensor, bias: Tensor | None) -> Tensor:
    parts = rows.split([*counts, rows.shape[0] - sum(counts)])
    outs = [part @ weight[expert].t() for expert, part in enumerate(parts[:-1])]
    if bias is not None:
        outs = [out + bias[expert] for expert, out in enumerate(outs)]
    return torch.cat([*outs, parts[-1].new_zeros(parts[-1].shape[0], weight.shape[1])])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_and_gradients_equal_a_product_for_each_expert(counts, has_bias):
    leaves = make()[: 3 if has_bias else 2]
    rows, weight, bias = (*leaves, None)[:3]
    results = []
    for out in (
        plain(rows, counts, weight, bias),
        grouped_product(rows, torch.tensor(counts), weight, bias),
    ):
        scale = torch.arange(out.numel()).view_as(out)
        grads = torch.autograd.grad((out * scale).sum(), leaves)
        results.append([out, *grads])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    with torch.no_grad():
        out = grouped_product(rows, torch.tensor(counts), weight, bias)
    torch.testing.assert_close(out, results[0][0])


def test_no_rows_at_all_are_fine_forward_and_backward():
    rows, weight, bias = make(num_rows=0)
    out = grouped_product(rows, torch.zeros(3, dtype=torch.int64), weight, bias)
    assert out.shape == (0, 16)
    out.sum().backward()
    assert (weight.grad == 0).all()
    assert (bias.grad == 0).all()


def test_the_weights_of_an_expert_without_rows_are_never_read():
    rows, weight, bias = make()
    with torch.no_grad():
        weight[1], bias[1] = torch.nan, torch.nan
    out = grouped_product(rows, torch.tensor([5, 0, 3]), weight, bias)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(each.grad.isfinite().all() for each in (rows, weight, bias))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen):
    leaves = make()
    counts = torch.tensor([5, 0, 3])
    expected = torch.autograd.grad(
        grouped_product(leaves[0], counts, *leaves[1:]).square().sum(), leaves
    )
    leaves[frozen].requires_grad_(False)
    grouped_product(leaves[0], counts, *leaves[1:]).square().sum().backward()
    for index, leaf in enumerate(leaves):
        if index == frozen:
            assert leaf.grad is None
        else:
            assert torch.equal(leaf.grad, expected[index])


@pytest.mark.parametrize("multiplies_bf16", [False, True])
def test_bf16_under_autocast_is_close_to_fp32_and_gradients_come_in_the_weights_dtype(
    monkeypatch, multiplies_bf16
):
    monkeypatch.setattr(module, "multiplies_bf16", lambda: multiplies_bf16)
    leaves = make(torch.float32)
    counts = [4, 0, 3]
    expected = plain(leaves[0], counts, *leaves[1:])
    expected_grads = torch.autograd.grad(expected.square().sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_product(leaves[0], torch.tensor(counts), *leaves[1:])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.05)
    out.float().square().sum().backward()
    for leaf, grad in zip(leaves, expected_grads, strict=True):
        assert leaf.grad.dtype == torch.float32
        torch.testing.assert_close(leaf.grad, grad, rtol=0.05, atol=0.02 * grad.abs().max().item())


def test_the_operator_is_what_torch_asks_of_one():
    rows, weight, bias = make(torch.float32)
    torch.library.opcheck(
        torch.ops.herder.grouped_product.default,
        (rows, torch.tensor([5, 0, 2]), weight, bias),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_grouped_kernel_equals_the_loop(counts):
    results = []
    for device in ("cpu", "cuda"):
        leaves = [each.detach().to(device).requires_grad_() for each in make(torch.bfloat16)]
        out = grouped_product(leaves[0], torch.tensor(counts, device=device), *leaves[1:])
        out.float().square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=0.02, atol=0.1)
