"""Quantized weights as the plain matrices they stand for: a layer between files and the loader.

Owns which stored tensors make up one matrix, what their headers must say, and how their values are
put together. Which module has which precision is families' knowledge; what a name is in our model
is the loader's. Legend: R rows and C columns as stored, B blocks of columns, O outputs, I inputs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, prod

import torch
from torch import Tensor

from herder.checkpoint.stored import StoredTensor
from herder.checkpoint.tensors import PLAIN_DTYPES, read_tensor
from herder.errors import WeightsError
from herder.families.quantization import Precision, Quantization, Storage
from herder.families.weights import listed

_PART_OF_LEAF = {
    **dict.fromkeys(("weight", "weight_packed", "qweight", "blocks"), "values"),
    **dict.fromkeys(("weight_scale", "weight_scale_inv", "scales"), "scale"),
    **dict.fromkeys(("weight_zero_point", "qzeros"), "zero"),
    **dict.fromkeys(("weight_g_idx", "g_idx"), "group_of_input"),
    "weight_shape": "shape",
}
_NOT_READ = re.compile(
    r".*\.((input|output|activation)_(scale|zero_point|scale_ub)|[qkv]_(scale|zero_point))"
)
"""How activations and the cache would be quantized."""
_MXFP4_NAME = re.compile(r"(.*)_(blocks|scales)")
_VALUE_KINDS: dict[Storage, str] = {
    "fp8": "F8_E4M3", "int8": "I8", "packed": "I32", "gptq": "I32", "awq": "I32", "mxfp4": "U8",
}  # fmt: skip
_WORD_BITS = 32
_VALUES_AT_ONCE = 1 << 17
"""Put together at once, in whole words of rows: many amortize calls, few stay in cache."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of a word's eight numbers stands for each column. Source: AutoAWQ, utils/packing_utils."""
_FP4_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 3 low bits; the fourth is the sign. Source: OCP MX specification, 5.3.3."""


@dataclass(frozen=True)
class QuantizedTensor:
    """One matrix that several stored tensors stand for."""

    precision: Precision
    parts: Mapping[str, StoredTensor]
    """Stored tensors by what they are: values, scale, zero, shape, group_of_input."""
    shape: tuple[int, ...]
    """Of the matrix, [O, I]; of mxfp4's stacked experts [E, I, O]."""
    kind: str = "BF16"
    """What its values are worth keeping in."""

    @property
    def num_bytes(self) -> int:
        """Of all its parts in their files."""
        return sum(part.num_bytes for part in self.parts.values())


def logical_tensors(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None, *, where: str
) -> dict[str, StoredTensor | QuantizedTensor]:
    """The model's tensors by their plain names, out of what safetensors files hold.

    A quantized matrix takes the name of its plain form; scales of activations and cache are left
    out. Raises WeightsError that lists every part that is missing, misshapen, of another dtype
    than its format has, or stored quantized where the config does not say so. A matrix that is
    stored plain is read as it is.
    """
    found: dict[str, StoredTensor | QuantizedTensor] = {}
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in stored.items():
        module, leaf = _module_and_leaf(name)
        if leaf in _PART_OF_LEAF:
            modules[module][leaf] = tensor
        elif not _NOT_READ.fullmatch(name):
            found[name] = tensor
    problems: list[str] = []
    for module, leaves in modules.items():
        if leaves.keys() == {"weight"} and leaves["weight"].kind in PLAIN_DTYPES:
            found[f"{module}.weight"] = leaves["weight"]
            continue
        precision = quantization.precision_of(module) if quantization else None
        try:
            name = module if "blocks" in leaves else f"{module}.weight"
            found[name] = _matrix(leaves, precision)
        except WeightsError as error:
            problems.append(f"{module}: {error}")
    odd = [name for name, t in found.items() if t.kind not in PLAIN_DTYPES]
    problems += [f"{name} has dtype {found[name].kind}" for name in odd]
    if problems:
        lines = listed(problems, separator="\n  ")
        raise WeightsError(f"{where}: {len(problems)} tensors cannot be read.\n  {lines}")
    return found


def _module_and_leaf(name: str) -> tuple[str, str]:
    stacked = _MXFP4_NAME.fullmatch(name)
    if stacked is not None:
        return stacked[1], stacked[2]
    module, _, leaf = name.rpartition(".")
    return module, leaf


def _matrix(leaves: Mapping[str, StoredTensor], precision: Precision | None) -> QuantizedTensor:
    """The matrix of one module's tensors. Raises WeightsError that says what does not fit."""
    told = ", ".join(f"{leaf} {t.kind} {list(t.shape)}" for leaf, t in sorted(leaves.items()))
    if precision is None:
        raise WeightsError(f"config.json does not say it is quantized, but the files hold {told}")
    parts = {_PART_OF_LEAF[leaf]: tensor for leaf, tensor in leaves.items()}
    needed = {"values", "scale"}
    needed |= {"shape"} if precision.storage == "packed" else set()
    needed |= set() if precision.symmetric else {"zero"}
    wanted, num_dims = _VALUE_KINDS[precision.storage], 4 if precision.storage == "mxfp4" else 2
    if (
        needed != parts.keys() - {"group_of_input"}
        or len(parts) != len(leaves)
        or (parts["values"].kind, len(parts["values"].shape)) != (wanted, num_dims)
    ):
        raise WeightsError(
            f"config.json says {precision.storage}, which is {' and '.join(sorted(needed))} with "
            f"values of {num_dims} dims in {wanted}; the files hold {told}"
        )
    return _checked(QuantizedTensor(precision, parts, _shape(precision, parts)))


def _shape(precision: Precision, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    rows, columns, *rest = (*parts["values"].shape, 0)
    a_word = _WORD_BITS // precision.bits
    match precision.storage:
        case "packed":
            return tuple(read_tensor(parts["shape"]).tolist())
        case "gptq":
            return (columns, rows * a_word)
        case "awq":
            return (columns * a_word, rows)
        case "mxfp4":
            groups, num_bytes = rest[:2]
            return (rows, groups * num_bytes * 2, columns)
        case _:
            return (rows, columns)


def _checked(matrix: QuantizedTensor) -> QuantizedTensor:
    """The same, if its scales and zero points are as many as its blocks."""
    grid = _grid(matrix)
    counts = {"scale": grid[0] * grid[1]}
    if "zero" in matrix.parts:
        a_word = _WORD_BITS // matrix.precision.bits
        packed = {
            "packed": (ceil(grid[0] / a_word), grid[1]),
            "gptq": (grid[0], grid[1] // a_word),
            "awq": (grid[0], grid[1] // a_word),
        }.get(matrix.precision.storage, grid)
        counts["zero"] = packed[0] * packed[1]
    if "group_of_input" in matrix.parts:
        counts["group_of_input"] = matrix.shape[-1]
    for part, count in counts.items():
        shape = matrix.parts[part].shape
        if prod(shape) != count:
            raise WeightsError(
                f"{part} is {list(shape)}, but {list(matrix.shape)} in blocks of "
                f"{matrix.precision.block} needs {count} numbers in it"
            )
    return matrix


def _stored_as(matrix: QuantizedTensor) -> tuple[int, int, int, int]:
    """Rows, columns and the block's rows and columns in the order that the file holds them."""
    outputs, inputs = matrix.shape[-2:]
    block_outputs, block_inputs = matrix.precision.block
    match matrix.precision.storage:
        case "gptq" | "awq":
            return inputs, outputs, block_inputs or inputs, block_outputs or outputs
        case "mxfp4":
            experts, inputs, outputs = matrix.shape
            return experts * outputs, inputs, block_outputs, block_inputs
        case _:
            return outputs, inputs, block_outputs or outputs, block_inputs or inputs


def _grid(matrix: QuantizedTensor) -> tuple[int, int]:
    """How many scales a matrix has, by rows and by columns as stored."""
    rows, columns, block_rows, block_columns = _stored_as(matrix)
    return ceil(rows / block_rows), ceil(columns / block_columns)


def read_values(tensor: StoredTensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """A tensor in memory of its own: plain values cast, quantized ones put together in fp32.

    value = (stored - zero point) * scale, rounded once to `dtype`. Beside the stored bytes and the
    result only a strip of rows is held.
    """
    if isinstance(tensor, StoredTensor):
        return read_tensor(tensor).to(dtype)
    rows, columns, *_ = _stored_as(tensor)
    storage = tensor.precision.storage
    parts = {name: read_tensor(part) for name, part in tensor.parts.items()}
    scale_RB, zero_RB = _scales(tensor, parts["scale"]), _zeros(tensor, parts)
    is_transposed = storage in ("gptq", "awq")
    matrix = torch.empty((columns, rows) if is_transposed else (rows, columns), dtype=dtype)
    step = max(1, _VALUES_AT_ONCE // columns // _WORD_BITS) * _WORD_BITS
    for start in range(0, rows, step):
        end = min(start + step, rows)
        values_RC = _values(tensor, parts["values"], start, end)
        if zero_RB is not None:
            zero_RB1 = _rows(tensor, zero_RB, parts, start, end)
            values_RC.view(end - start, zero_RB1.shape[1], -1).sub_(zero_RB1)
        scale_RB1 = _rows(tensor, scale_RB, parts, start, end)
        values_RC.view(end - start, scale_RB1.shape[1], -1).mul_(scale_RB1)
        if is_transposed:
            matrix[:, start:end] = values_RC.T
        else:
            matrix[start:end] = values_RC
    if storage == "mxfp4":
        experts, inputs, outputs = tensor.shape
        return matrix.view(experts, outputs, inputs).transpose(1, 2)
    return matrix


def _scales(tensor: QuantizedTensor, scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.float().reshape(_grid(tensor))


def _zeros(tensor: QuantizedTensor, parts: Mapping[str, Tensor]) -> Tensor | None:
    """Zero points, one a scale, or the one that all values share; None: zero."""
    precision, grid = tensor.precision, _grid(tensor)
    if precision.symmetric:
        is_shifted = precision.storage == "packed"
        return torch.full((1, 1), 2.0 ** (precision.bits - 1)) if is_shifted else None
    zero, rows = parts["zero"], grid[0]
    if precision.storage == "packed":
        zero = _unpacked(zero, precision, dim=0)[:rows]
    elif precision.storage != "int8":
        zero = _unpacked(zero, precision, dim=1) + precision.zero_offset
    return zero.float().reshape(grid)


def _values(tensor: QuantizedTensor, stored: Tensor, start: int, end: int) -> Tensor:
    """Rows of the stored values as fp32 of their own, before zero points and scales."""
    precision = tensor.precision
    match precision.storage:
        case "packed":
            words = stored[start:end]
            return _unpacked(words, precision, dim=1)[:, : tensor.shape[1]].float().contiguous()
        case "gptq":
            a_word = _WORD_BITS // precision.bits
            return _unpacked(stored[start // a_word : end // a_word], precision, dim=0).float()
        case "awq":
            return _unpacked(stored[start:end], precision, dim=1).float()
        case "fp8" | "mxfp4":
            rows = stored.view(torch.uint8).flatten(0, stored.ndim // 2 - 1)[start:end]
            table = _values_of_bytes(precision.storage)
            return table.index_select(0, rows.flatten().int()).view(end - start, -1)
        case _:
            return stored[start:end].float()


@cache
def _values_of_bytes(storage: Storage) -> Tensor:
    """What each byte stands for: one number of fp8, or two of fp4, the low bits first.

    Looked up, as torch's own cast of fp8 takes four times as long on a CPU.
    """
    if storage == "fp8":
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    magnitudes = torch.tensor(_FP4_E2M1)
    nibbles = torch.cat((magnitudes, -magnitudes))
    return torch.stack((nibbles.repeat(16), nibbles.repeat_interleave(16)), dim=1)


def _unpacked(words: Tensor, precision: Precision, *, dim: int) -> Tensor:
    """The numbers of 32-bit words in place of them, lowest bits first but in AWQ."""
    bits = precision.bits
    order = _AWQ_ORDER if precision.storage == "awq" else range(_WORD_BITS // bits)
    shifts = torch.tensor([place * bits for place in order], dtype=torch.int32)
    shifts = shifts.view(-1, *[1] * (words.ndim - 1 - dim))
    return ((words.unsqueeze(dim + 1) >> shifts) & (1 << bits) - 1).flatten(dim, dim + 1)


def _rows(
    tensor: QuantizedTensor, grid: Tensor, parts: Mapping[str, Tensor], start: int, end: int
) -> Tensor:
    """[R, B, 1]: what the rows start to end have of a grid, one number for each run of columns."""
    if grid.numel() == 1:
        return grid[:, :, None]
    _, columns, block_rows, block_columns = _stored_as(tensor)
    group, storage = parts.get("group_of_input"), tensor.precision.storage
    if group is not None and storage == "gptq":
        return grid[group[start:end]][:, :, None]
    rows = grid[torch.arange(start, end) // block_rows]
    if group is not None:
        rows = rows[:, group]
    elif columns % block_columns:
        rows = rows[:, torch.arange(columns) // block_columns]
    return rows[:, :, None]
