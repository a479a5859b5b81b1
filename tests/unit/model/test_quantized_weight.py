"""Matrices in 8 and 4 bits: what is kept of each number, and products that are the wide matrix'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from herder.config.quantization import GROUP_SIZES, QUANTIZATIONS, WeightQuantization
from herder.model import linear
from herder.model.grouped_product import grouped_product
from herder.model.linear import Linear, product
from herder.model.quantized_weight import quantized

FORMATS = [WeightQuantization(name, size) for name in QUANTIZATIONS for size in GROUP_SIZES]
each_format = pytest.mark.parametrize("how", FORMATS, ids=str)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ranges(matrix_OI: Tensor, group_size: int) -> Tensor:
    """Each number's group, from its least to its largest number."""
    spans = [
        (group.amax(1) - group.amin(1))[:, None].expand_as(group)
        for group in matrix_OI.split(group_size, dim=1)
    ]
    return torch.cat(spans, dim=1)


@each_format
@pytest.mark.parametrize("num_inputs", [64, 96, 33, 576])
def test_no_number_is_further_away_than_half_a_step(
    how: WeightQuantization, num_inputs: int
) -> None:
    matrix_OI = numbers(19, num_inputs) * numbers(19, 1, seed=1)
    weight = quantized(matrix_OI, how)
    assert weight.shape == (19, how.row_words(num_inputs))
    # A scale in bf16 is up to 1/128 above, and so is the distance that the least number moves.
    least = matrix_OI.abs().amax() / 128
    steps_OI = (ranges(matrix_OI, how.group_size) + least) * (1 + 1 / 128) / (2**how.bits - 1)
    assert ((weight.wide(torch.float32) - matrix_OI).abs() <= steps_OI / 2 * 1.001).all()


@pytest.mark.parametrize("how", FORMATS[3:], ids=str)
def test_numbers_of_sixteen_kinds_come_back_from_four_bits_as_they_were(
    how: WeightQuantization,
) -> None:
    codes_OI = torch.randint(0, 16, (7, 200), generator=torch.Generator().manual_seed(0))
    codes_OI[:, ::32], codes_OI[:, 1::32] = 0, 15  # each group has both ends
    matrix_OI = codes_OI * 0.5 - 3
    assert torch.equal(quantized(matrix_OI, how).wide(torch.float32), matrix_OI)


def test_groups_of_equal_numbers_are_exact_in_bf16() -> None:
    matrix_OI = torch.tensor([[0.0], [-2.5], [1e30]]).expand(3, 70)
    wide_OI = quantized(matrix_OI, FORMATS[0]).wide(torch.bfloat16)
    assert torch.equal(wide_OI, matrix_OI.bfloat16())


def test_a_number_that_is_not_finite_is_refused() -> None:
    matrix_OI = numbers(3, 64)
    matrix_OI[1, 5] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        quantized(matrix_OI, FORMATS[0])


@pytest.mark.parametrize("how", [FORMATS[1], FORMATS[3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_computes_what_it_does_with_the_matrix_put_together(
    how: WeightQuantization,
    dtype: torch.dtype,
    has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "_CPU_PANEL_NUMBERS", 10 * 70)  # four panels, the last one shorter
    made = {"axes": ("heads", "embed"), "bias": has_bias, "device": "cpu", "dtype": dtype}
    layer = Linear(70, 37, **made).requires_grad_(False)
    matrix_OI = numbers(37, 70)
    weight = quantized(matrix_OI, how)
    setattr(layer, "weight", weight)  # noqa: B010
    for num_rows in (1, 3, 40):
        x_TI = numbers(num_rows, 70, seed=2).to(dtype)
        expected_TO = x_TI.float() @ weight.wide(torch.float32).t()
        if layer.bias is not None:
            expected_TO += layer.bias.float()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        out_TO = layer(x_TI)
        assert out_TO.dtype == dtype
        torch.testing.assert_close(out_TO.float(), expected_TO, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("how", [FORMATS[0], FORMATS[3]], ids=str)
def test_experts_multiply_as_with_matrices_put_together(how: WeightQuantization) -> None:
    weight = quantized(numbers(4, 24, 40), how)
    counts_E, bias_EO = torch.tensor([3, 0, 50, 1]), numbers(4, 24, seed=1)
    rows_RI = numbers(56, 40, seed=2)  # the last two are nobody's
    out_RO = grouped_product(rows_RI, counts_E, weight, bias_EO)
    expected_RO = grouped_product(rows_RI, counts_E, weight.wide(torch.float32), bias_EO)
    torch.testing.assert_close(out_RO, expected_RO, rtol=1e-5, atol=1e-5)
    assert torch.equal(weight.part(2).wide(torch.float32), weight.wide(torch.float32)[2])


def test_gradients_reach_what_lies_before_a_quantized_layer() -> None:
    weight = quantized(numbers(8, 64), FORMATS[0])
    x_TI = numbers(3, 64).requires_grad_()
    product(x_TI, weight).sum().backward()
    assert x_TI.grad is not None
    torch.testing.assert_close(x_TI.grad, weight.wide(torch.float32).sum(0).expand(3, 64))
