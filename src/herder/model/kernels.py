"""The operators of SOURCES, where they were built and loaded: inference on CPU, faster.

torch's matrix-vector products read memory at about half the speed it has, and a token's small
steps cost more to start than to compute. Each operator computes what the Python of its module
computes; without them, with gradients and in compiled code that Python runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

FEW_ROWS = 8
"""Up to here a product is bound by reading the weights, which are half as wide in bf16."""
FEW_QUANTIZED_ROWS = 16
"""Up to here of a quantized weight: to put the matrix together costs as much as these."""
SOURCES = tuple(map(Path(__file__).with_name, ("kernels.cpp", "quantized_kernels.cpp")))
DTYPES = (torch.float32, torch.bfloat16)


class Kernels:
    """Whether the operators are in the process. Their namespace is `torch.ops.herder`."""

    operators: ClassVar[Any] = None

    @classmethod
    def load(cls, library: Path) -> None:
        """Use `library`, built from SOURCES, from now on."""
        if cls.operators is None:
            torch.ops.load_library(library)
            cls.operators = torch.ops.herder

    @classmethod
    def take(cls, x: Tensor) -> bool:
        """Whether they compute something of x."""
        return (
            cls.operators is not None
            and x.device.type == "cpu"
            and x.dtype in DTYPES
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        )
