"""Tensor parallelism with sequence parallelism, around a decoder whose forward knows neither.

Between attention and feed-forward every rank has its share of the rows; inside them it has all rows
and its share of heads or of the hidden width. Parameters become DTensors; while a leaf computes, it
sees its own part as a plain tensor. Whatever a rank computes of a gradient inside is its part of a
sum: a parameter that is split has its own, one that is whole gets the sum over ranks.

Source: Megatron-LM, arXiv:1909.08053, section 3; sequence parallelism: arXiv:2205.05198.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from herder.config.architecture import GroupedQueryAttention
from herder.model.decoder import Decoder, Embedding
from herder.model.norm import RmsNorm
from herder.model.readout import Vocabulary
from herder.parallel.collectives import gather_dims, gather_rows, scatter_sum
from herder.parallel.leaves import Leaf
from herder.parallel.rules import leaf_axes, split_dim

_AXIS = "tp"


def apply_tensor_parallel(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Split a decoder, or a stage of one, over a one-dimensional mesh. Nothing is communicated.

    Tied parameters stay one. Degrees that do not divide the model are the planner's to refuse.
    """
    attention = decoder.config.attention
    is_grouped = isinstance(attention, GroupedQueryAttention)
    num_kv_heads = attention.num_key_value_heads if is_grouped else 0
    made: dict[int, nn.Parameter] = {}
    for module in decoder.modules():
        axes = leaf_axes(module)
        if axes is None or _is_split(module):
            continue
        copied = "kv_heads" in axes and num_kv_heads < mesh.size()
        leaf = Leaf(module, axes, mesh, num_kv_heads if copied else None)
        leaf.split(made)
        if isinstance(module, RmsNorm) and split_dim(axes, _AXIS) is not None:
            _norm_whole_projection(module, leaf, mesh)
        else:
            leaf.register()
    for layer in decoder.layers.values():
        for region in (layer.get_submodule("attention"), layer.get_submodule("feed_forward")):
            _gather_input(region, mesh)
            _scatter_output(region, mesh)
    if decoder.embed is not None:
        _look_up_own_entries(decoder.embed, mesh)
    if decoder.head is not None:
        _gather_input(decoder.head, mesh)


def _is_split(module: nn.Module) -> bool:
    """Whether expert parallelism has done it already, over these ranks too."""
    return all(isinstance(each, DTensor) for each in module.parameters(recurse=False))


class SplitVocabulary(Vocabulary):
    """Every rank has its slice of the logits; the loss needs their maxima and sums.

    Source: the cross-entropy of Megatron-LM, arXiv:1909.08053, section 3.
    """

    def __init__(self, num_entries: int, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self.first = mesh.get_local_rank() * (num_entries // mesh.size())

    def largest(self, x_C1: Tensor) -> Tensor:
        torch.distributed.all_reduce(x_C1, torch.distributed.ReduceOp.MAX, group=self._group)
        return x_C1

    def total(self, x: Tensor) -> Tensor:
        torch.distributed.all_reduce(x, group=self._group)
        return x


def _gather_input(module: nn.Module, mesh: DeviceMesh) -> None:
    group = mesh.get_group()

    def gather(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x_TD, *others = arguments
        return gather_rows(x_TD, group), *others

    module.register_forward_pre_hook(gather)


def _scatter_output(module: nn.Module, mesh: DeviceMesh) -> None:
    group = mesh.get_group()

    def scatter(_module: nn.Module, _arguments: tuple[Any, ...], x_TD: Tensor) -> Tensor:
        return scatter_sum(x_TD, group)

    module.register_forward_hook(scatter)


def _norm_whole_projection(module: RmsNorm, leaf: Leaf, mesh: DeviceMesh) -> None:
    """A norm over all heads together (OLMoE): on all ranks' heads, of which each keeps its own."""
    group, place = mesh.get_group(), mesh.get_local_rank()
    assert leaf.num_copied_heads is None, "the planner refuses copied heads that are normed whole"

    def enter(_module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        leaf.enter()
        parameters: dict[str, Any] = module._parameters
        parameters["weight"] = gather_rows(parameters["weight"], group)
        return (gather_dims(arguments[0], group),)

    def leave(_module: nn.Module, _arguments: tuple[Tensor], x: Tensor | None) -> Tensor | None:
        leaf.leave()
        return None if x is None else x.chunk(mesh.size(), dim=1)[place]

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _look_up_own_entries(embed: Embedding, mesh: DeviceMesh) -> None:
    """Each rank looks up what it holds, zeros for the rest, and keeps its rows of the sum."""
    num_entries = embed.num_embeddings // mesh.size()
    first, group = mesh.get_local_rank() * num_entries, mesh.get_group()
    is_own = list[Tensor]()

    def before(_module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        own_T = arguments[0] - first
        is_own.append((own_T >= 0) & (own_T < num_entries))
        return (own_T.where(is_own[-1], 0),)

    def after(_module: nn.Module, _arguments: tuple[Tensor], x_TD: Tensor) -> Tensor:
        return scatter_sum(x_TD * is_own.pop()[:, None], group)

    embed.register_forward_pre_hook(before)
    embed.register_forward_hook(after)
