"""Two checkpoints side by side: what they were made of, and every value of every tensor.

Whatever layout wrote them: tensors are put together one by one, so that one of each is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from herder.checkpoint.manifest import base_of
from herder.checkpoint.metadata import differing_keys, read_meta
from herder.checkpoint.sharded import load_tensors, read_metadata, tensors_of
from herder.checkpoint.source import model_pieces, optimizer_pieces

Changed = dict[str, tuple[JsonValue, JsonValue]]
_VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class TensorDifference:
    """How far apart one tensor is in two checkpoints."""

    name: str
    num_differing: int
    """Values that are not equal. 0 where only bits differ, as of a zero's sign."""
    num_values: int
    largest_absolute: float
    """inf where one is NaN or infinite and the other is not."""
    largest_relative: float
    """That over the tensor's largest finite magnitude in either."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All in which two checkpoints A and B differ; dicts give A's value and B's."""

    config: Changed
    plan: Changed
    versions: Changed
    """Of packages, and git_commit of herder itself."""
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    misshapen: tuple[str, ...]
    """Tensors of another shape or dtype, with both."""
    tensors: tuple[TensorDifference, ...]
    """The most different first."""
    num_compared: int
    weights_only: bool
    """Whether optimizer states were left out, as a light checkpoint has none."""

    @property
    def is_same(self) -> bool:
        every = asdict(self)
        return not any(
            every[name] for name in every if name not in ("num_compared", "weights_only")
        )


def compare_checkpoints(
    a: Path, b: Path, *, on_bytes: Callable[[int], None] = lambda _num_bytes: None
) -> Comparison:
    """Compare two checkpoints. on_bytes hears of the bytes of each tensor that was compared.

    Raises CheckpointError for what cannot be read.
    """
    weights_only = base_of(a) is not None or base_of(b) is not None
    stored = [
        read_metadata([*model_pieces(each), *(() if weights_only else optimizer_pieces(each))])
        for each in (a, b)
    ]
    in_a, in_b = map(tensors_of, stored)
    misshapen, found, shared = list[str](), list[TensorDifference](), in_a.keys() & in_b.keys()
    for name in sorted(shared):
        (kind_a, size_a), (kind_b, size_b) = (
            (each[name].properties.dtype, each[name].size) for each in (in_a, in_b)
        )
        if (kind_a, size_a) != (kind_b, size_b):
            told = f"{kind_a} {list(size_a)} in A, {kind_b} {list(size_b)} in B"
            misshapen.append(f"{name} is {told.replace('torch.', '')}")
            continue
        values = [torch.empty(size_a, dtype=kind_a) for _ in stored]
        for value, each in zip(values, stored, strict=True):
            load_tensors({name: value}, each)
        difference = tensor_difference(name, *values)
        found += [] if difference is None else [difference]
        on_bytes(values[0].nbytes)
    made_a, made_b = read_meta(a), read_meta(b)
    versions = [{**each.versions, "git_commit": each.git_commit} for each in (made_a, made_b)]
    return Comparison(
        config=differing_keys(made_a.config, made_b.config),
        plan=differing_keys(made_a.plan, made_b.plan),
        versions=differing_keys(*versions),
        only_in_a=tuple(sorted(in_a.keys() - shared)),
        only_in_b=tuple(sorted(in_b.keys() - shared)),
        misshapen=tuple(misshapen),
        tensors=tuple(sorted(found, key=lambda each: (-each.largest_relative, each.name))),
        num_compared=len(shared) - len(misshapen),
        weights_only=weights_only,
    )


def tensor_difference(name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    """How far two tensors of one shape and dtype are apart; None if they are equal to the bit."""
    if not a.numel():
        return None
    count, largest, magnitude, same_bits = 0, 0.0, 0.0, True
    pairs = zip(*(x.reshape(-1).split(_VALUES_AT_ONCE) for x in (a, b)), strict=True)
    for x, y in pairs:
        if torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            magnitude = max(magnitude, _magnitude(x.double()))
            continue
        same_bits, x, y = False, x.double(), y.double()
        differ = (x != y) & ~(x.isnan() & y.isnan())
        gap = torch.where(differ, (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf), 0.0)
        count += int(differ.sum())
        largest = max(largest, gap.max().item())
        magnitude = max(magnitude, _magnitude(x), _magnitude(y))
    if same_bits:
        return None
    relative = largest / magnitude if magnitude else math.inf if largest else 0.0
    return TensorDifference(name, count, a.numel(), largest, relative)


def _magnitude(x: Tensor) -> float:
    return torch.where(x.isfinite(), x.abs(), 0.0).max().item()


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Under the fields' names; what is not finite is null."""
    found = asdict(comparison)
    for each in found["tensors"]:
        each.update({k: None for k, v in each.items() if v == math.inf})
    return {"same": comparison.is_same, **found}
