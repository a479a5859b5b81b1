"""Linear layers, on processors with and without bf16 arithmetic.

Legend: T tokens, I input dim, O output dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from herder.model.autograd import Function
from herder.model.axes import Axes
from herder.model.kernels import FEW_QUANTIZED_ROWS, FEW_ROWS, Kernels
from herder.model.quantized_weight import QuantizedWeight

_onednn_linear = torch.ops.mkldnn._linear_pointwise
"""The same product by oneDNN, which takes a tenth less time than MKL on AMD processors."""
_CPU_PANEL_NUMBERS, _GPU_PANEL_NUMBERS = 1 << 20, 1 << 26
"""Of a quantized matrix put together at once: they stay in a CPU's cache."""


class Linear(nn.Linear):
    """x W^T + b.

    In bf16 on a processor without bf16 multiplication the products are taken in fp32: two bf16
    numbers multiply exactly there, and emulating the instruction takes several times as long.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        axes: Axes,
        bias: bool,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(in_dim, out_dim, bias=bias, device=device, dtype=dtype)
        self.axes = axes

    def forward(self, input: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        return product(input, self.weight, self.bias)


def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """[T, O]: what Linear computes, of a weight that is not one's own."""
    if isinstance(weight_OI, QuantizedWeight):
        return _quantized_product(x_TI, weight_OI, bias_O)
    if x_TI.device.type == "cpu":
        if x_TI.shape[0] <= FEW_ROWS:
            if Kernels.take(x_TI):
                return Kernels.operators.few_rows_product(x_TI, weight_OI, bias_O)
        elif product_dtype(x_TI) == torch.bfloat16 and not multiplies_bf16():
            return _WideProduct.apply(x_TI, weight_OI, bias_O)
        elif x_TI.dtype == torch.float32 and Kernels.take(x_TI):
            return _onednn_linear(x_TI, weight_OI, bias_O, "none", [], "")
    return F.linear(x_TI, weight_OI, bias_O)


def _quantized_product(x_TI: Tensor, weight: QuantizedWeight, bias_O: Tensor | None) -> Tensor:
    """Few rows straight from the packed words; for many, rows of the matrix are put together."""
    if x_TI.shape[0] <= FEW_QUANTIZED_ROWS and Kernels.take(x_TI):
        how = weight.how
        return Kernels.operators.quantized_product(x_TI, weight, bias_O, how.bits, how.group_size)
    (wide_TI,) = widen(x_TI)
    num_outputs = weight.shape[0]
    out_TO = x_TI.new_empty(x_TI.shape[0], num_outputs)
    panel_numbers = _CPU_PANEL_NUMBERS if x_TI.device.type == "cpu" else _GPU_PANEL_NUMBERS
    step = max(1, panel_numbers // weight.num_inputs)
    for start in range(0, num_outputs, step):
        rows = slice(start, start + step)
        panel_PI = weight.part(rows).wide(wide_TI.dtype)
        bias_P = None if bias_O is None else bias_O[rows].to(wide_TI.dtype)
        out_TO[:, rows] = product(wide_TI, panel_PI, bias_P)
    return out_TO


def product_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product of x is computed in: autocast's dtype where it is on."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


@torch.compiler.assume_constant_result
def multiplies_bf16() -> bool:
    """Whether this processor multiplies bf16 matrices itself (AVX512, AMX or Arm BF16)."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In fp32 where this processor would have to emulate their products in bf16."""
    first = tensors[0]
    if first.dtype != torch.bfloat16 or first.device.type != "cpu" or multiplies_bf16():
        return tensors
    return tuple(tensor.float() for tensor in tensors)


class _WideProduct(Function):
    """bf16 in, bf16 out and kept for the backward pass; fp32 between."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        low_x_TI = x_TI.bfloat16()
        ctx.save_for_backward(low_x_TI, weight_OI, bias_O)
        ctx.x_dtype = x_TI.dtype
        bias_O = None if bias_O is None else bias_O.float()
        with torch.autocast("cpu", enabled=False):
            return F.linear(low_x_TI.float(), weight_OI.float(), bias_O).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        low_x_TI, weight_OI, bias_O = ctx.saved_tensors
        wide_grad_TO = grad_TO.float()
        x_grad = weight_grad = bias_grad = None
        # A compiled backward pass is traced under its forward's autocast.
        with torch.autocast("cpu", enabled=False):
            if ctx.needs_input_grad[0]:
                x_grad = (wide_grad_TO @ weight_OI.float()).to(ctx.x_dtype)
            if ctx.needs_input_grad[1]:
                weight_grad = (wide_grad_TO.t() @ low_x_TI.float()).to(weight_OI.dtype)
            if bias_O is not None and ctx.needs_input_grad[2]:
                bias_grad = wide_grad_TO.sum(0).to(bias_O.dtype)
        return x_grad, weight_grad, bias_grad
