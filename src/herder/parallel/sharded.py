"""ZeRO: state shared out over ranks by FSDP2, one unit a layer, and one for each end of the model.

Parameters are gathered in the compute dtype and gradients reduced in the plan's; the sharded fp32
parameters are the optimizer's master copy. What the stages differ in is what stays gathered between
micro-batches. What is allocated is counted in plan/allocated.py, which also says which dim is
sharded. Source: ZeRO, arXiv:1910.02054, section 5.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Shard

from herder.model.decoder import Decoder
from herder.model.experts import Experts
from herder.model.router import Router
from herder.parallel.shards import held_tensor
from herder.plan.allocated import sharded_dim
from herder.plan.layout import ZeroStage

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ShardedState:
    """A decoder's FSDP units, and when they communicate."""

    def __init__(self, decoder: Decoder, zero_stage: ZeroStage) -> None:
        assert isinstance(decoder, FSDPModule), "apply_sharding comes first"
        self._root = decoder
        self._zero_stage = zero_stage
        self._is_left = False

    def expect_last(self, *, is_last: bool) -> None:
        """Say whether the backward that comes next is the step's last.

        Stage 1 keeps whole gradients until then and reduces them once; stages 2 and 3 reduce those
        of every micro-batch. Stages 1 and 2 keep parameters gathered until then.
        """
        self._root.set_requires_gradient_sync(is_last or self._zero_stage > 1)
        self._root.set_reshard_after_backward(is_last or self._zero_stage == 3)
        self._root.set_is_last_backward(is_last)
        self._is_left = not is_last

    def finish(self) -> None:
        """Return when gradients are reduced: the last backward has waited for that, if there was
        one that was told to be the last, and if it ran through the hooks of the units."""
        if self._is_left:
            self.expect_last(is_last=True)
            # torch does this for its pipeline's stages, of which it reads nothing else.
            stage: Any = SimpleNamespace(submod=self._root)
            PipelineStage.perform_reduce_grad(stage, 1)
            self._is_left = False

    def release(self) -> None:
        """Let go of parameters that a forward without a backward left gathered."""
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def apply_sharding(
    decoder: Decoder,
    mesh: DeviceMesh,
    *,
    experts: DeviceMesh | None = None,
    zero_stage: ZeroStage,
    compute: str,
    reduce: str,
) -> None:
    """Shard every parameter over a mesh of one axis, or of (copies, shards).

    experts: that of the ranks that hold the same experts, where expert parallelism spreads them.
    compute, reduce: fp32 or bf16, what parameters are gathered in and gradients summed in. Routers
    stay in fp32, whatever the rest computes in. To be called after recompute and compile and before
    memory is given to a decoder on meta.
    """
    reshard = zero_stage == 3
    policy = MixedPrecisionPolicy(param_dtype=_DTYPES[compute], reduce_dtype=_DTYPES[reduce])
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)

    def shard(
        unit: nn.Module, policy: MixedPrecisionPolicy = policy, mesh: DeviceMesh = mesh
    ) -> None:
        def placement(parameter: nn.Parameter) -> Shard:
            return Shard(sharded_dim(held_tensor(parameter).shape, mesh.shape[-1]))

        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=placement,
        )

    for layer in decoder.layers.values():
        for module in layer.modules():
            if isinstance(module, Router):
                shard(module, exact)
            if isinstance(module, Experts) and experts is not None:
                shard(module, mesh=experts)
        shard(layer)
    if not decoder.config.tie_embeddings:  # one parameter belongs to one unit: the root's
        if decoder.embed is not None:
            shard(decoder.embed)
        if decoder.head is not None:
            shard(decoder.head)
    shard(decoder)
    _prefetch(list(decoder.layers.values()))
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum: the loss is divided by its weight
            module.set_force_sum_reduction_for_comms(True)


def _prefetch(layers: list[nn.Module]) -> None:
    """Each layer asks for the next one's parameters before it computes, both ways."""
    units = [layer for layer in layers if isinstance(layer, FSDPModule)]
    for layer, following in pairwise(units):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
