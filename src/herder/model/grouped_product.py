"""Products of sorted rows with the matrix of the expert they belong to, as one custom operator.

Legend: R rows sorted by expert, E experts, I input dim, O output dim.

How many rows an expert has is data, so routing never compiles anything again, and an expert without
rows costs nothing. Rows past the sum of the counts belong to nobody: they give zeros. On GPUs bf16
goes to torch's grouped kernel. Elsewhere it is one product per expert that has rows, in fp32 where
a processor would have to emulate bf16, as in `linear`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from herder.model.kernels import FEW_ROWS, Kernels
from herder.model.linear import multiplies_bf16, product, product_dtype
from herder.model.quantized_weight import QuantizedWeight

_GROUPED_BYTES = 16
"""The grouped kernel wants every stride to be a multiple of this."""


def grouped_product(
    rows_RI: Tensor, counts_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None
) -> Tensor:
    """out_RO: each row times its expert's matrix, plus its bias, as Linear does (autocast too).

    counts_E: int64, how many rows each expert has; the first ones are expert 0's.
    """
    rows_RI = rows_RI.to(product_dtype(rows_RI))
    if isinstance(weight_EOI, QuantizedWeight):
        return _product_by_expert(rows_RI, counts_E, weight_EOI, bias_EO)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _operator(rows_RI, counts_E, weight_EOI, bias_EO)
    return _product(rows_RI, counts_E, weight_EOI, bias_EO)


def _product(
    rows_RI: Tensor, counts_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None
) -> Tensor:
    if _takes_grouped_kernel(rows_RI, weight_EOI):
        return _product_by_kernel(rows_RI, counts_E, weight_EOI, bias_EO)
    return _product_by_expert(rows_RI, counts_E, weight_EOI, bias_EO)


def _product_by_expert(
    rows_RI: Tensor, counts_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None
) -> Tensor:
    out_RO = rows_RI.new_empty(rows_RI.shape[0], weight_EOI.shape[1])
    experts, sizes = _segments(counts_E, rows_RI.shape[0])
    outs = out_RO.split(sizes)
    outs[-1].zero_()
    for expert, x, out in zip(experts, rows_RI.split(sizes), outs, strict=False):
        bias_O = None if bias_EO is None else bias_EO[expert]
        if isinstance(weight_EOI, QuantizedWeight):
            out.copy_(product(x, weight_EOI.part(expert), bias_O))
            continue
        weight_OI = weight_EOI[expert]
        if x.shape[0] <= FEW_ROWS and weight_OI.is_contiguous() and Kernels.take(x):
            out.copy_(Kernels.operators.few_rows_product(x, weight_OI, bias_O))
            continue
        _multiply(x, weight_OI.t(), out)
        if bias_O is not None:
            out += bias_O
    return out_RO


_operator = torch.library.custom_op("herder::grouped_product", _product, mutates_args=())


@torch.library.custom_op("herder::grouped_outer_product", mutates_args=())
def _outer_product(
    left_RO: Tensor, right_RI: Tensor, counts_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """out_EOI in `dtype`: the sum over each expert's rows of left x right, 0 where it has none."""
    if _takes_grouped_kernel(left_RO, right_RI):
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        out_EOI = F.grouped_mm(left_RO.t(), right_RI, offs=ends_E).to(dtype)
        return out_EOI.masked_fill_((counts_E == 0)[:, None, None], 0)
    shape = (counts_E.shape[0], left_RO.shape[1], right_RI.shape[1])
    out_EOI = torch.empty(shape, dtype=dtype, device=left_RO.device)
    experts, sizes = _segments(counts_E, left_RO.shape[0])
    for expert in set(range(counts_E.shape[0])).difference(experts):
        out_EOI[expert] = 0
    parts = zip(experts, left_RO.split(sizes), right_RI.split(sizes), strict=False)
    for expert, left, right in parts:
        _multiply(left.t(), right, out_EOI[expert])
    return out_EOI


def _segments(counts_E: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Experts that have rows, and how many; last, how many belong to nobody. Waits for a GPU."""
    counts = counts_E.tolist()
    experts = [expert for expert, count in enumerate(counts) if count]
    return experts, [*(counts[expert] for expert in experts), num_rows - sum(counts)]


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right, in left's dtype or wider. Autocast leaves products with `out` alone."""
    if left.dtype == torch.bfloat16 and left.device.type == "cpu" and not multiplies_bf16():
        left = left.float()
    right = right.to(left.dtype)
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        wide = torch.empty(out.shape, dtype=left.dtype, device=out.device)
        out.copy_(torch.mm(left, right, out=wide))


def _takes_grouped_kernel(left: Tensor, right: Tensor) -> bool:
    widths_bytes = [2 * each for each in (*left.shape[1:], *right.shape[1:])]
    return (
        left.device.type == "cuda"
        and left.dtype == torch.bfloat16
        and left.shape[0] > 0
        and all(width % _GROUPED_BYTES == 0 for width in widths_bytes)
    )


def _product_by_kernel(
    rows_RI: Tensor, counts_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None
) -> Tensor:
    """The kernel leaves rows that belong to nobody unwritten."""
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    weight_EOI = weight_EOI.to(rows_RI.dtype)
    out_RO = F.grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=ends_E)
    row_R = torch.arange(rows_RI.shape[0], dtype=torch.int32, device=rows_RI.device)
    if bias_EO is not None:
        expert_R = torch.searchsorted(ends_E, row_R, right=True)
        out_RO += bias_EO[expert_R.clamp(max=bias_EO.shape[0] - 1)]
    return out_RO.masked_fill_((row_R >= ends_E[-1])[:, None], 0)


@_operator.register_fake
def _product_shape(
    rows_RI: Tensor, counts_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None
) -> Tensor:
    del counts_E, bias_EO
    return rows_RI.new_empty(rows_RI.shape[0], weight_EOI.shape[1])


@_outer_product.register_fake
def _outer_product_shape(
    left_RO: Tensor, right_RI: Tensor, counts_E: Tensor, dtype: torch.dtype
) -> Tensor:
    shape = (counts_E.shape[0], left_RO.shape[1], right_RI.shape[1])
    return left_RO.new_empty(shape, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    rows_RI, counts_E, weight_EOI, bias_EO = inputs
    ctx.save_for_backward(rows_RI, counts_E, weight_EOI)
    ctx.bias_dtype = None if bias_EO is None else bias_EO.dtype


def _differentiate(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
    rows_RI, counts_E, weight_EOI = ctx.saved_tensors
    needs_rows, _, needs_weight, needs_bias = ctx.needs_input_grad
    grad_RO = grad_RO.contiguous()
    rows_grad = weight_grad = bias_grad = None
    if needs_rows:
        rows_grad = _operator(grad_RO, counts_E, weight_EOI.transpose(1, 2), None)
    if needs_weight:
        weight_grad = _outer_product(grad_RO, rows_RI, counts_E, weight_EOI.dtype)
    if needs_bias:
        # A sum is a product with ones, as many as the grouped kernel's strides ask for.
        ones = grad_RO.new_ones(grad_RO.shape[0], _GROUPED_BYTES // 2)
        bias_grad = _outer_product(grad_RO, ones, counts_E, ctx.bias_dtype)[:, :, 0]
    return rows_grad, None, weight_grad, bias_grad


_operator.register_autograd(_differentiate, setup_context=_save)
