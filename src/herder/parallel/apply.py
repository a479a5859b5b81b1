"""One function that turns the single-process model into any layout, without touching a forward.

Owns the order in which things are wrapped, and what of a layout a training step must know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from herder.config.architecture import ArchitectureConfig
from herder.model.build import materialize, tie
from herder.model.decoder import Decoder
from herder.model.readout import WHOLE_VOCABULARY, Vocabulary
from herder.model.routing import num_routing_sums
from herder.parallel.compile import apply_compile
from herder.parallel.context import WHOLE_CONTEXT, Context, SplitContext
from herder.parallel.expert import apply_expert_parallel
from herder.parallel.mesh import build_state_mesh
from herder.parallel.naive import NaiveDataParallel
from herder.parallel.pipeline import Pipeline, Shapes, cut_into_stages
from herder.parallel.recompute import apply_recompute
from herder.parallel.replicas import GradientSync
from herder.parallel.rules import leaf_axes
from herder.parallel.sharded import ShardedState, apply_sharding
from herder.parallel.shards import held_tensor
from herder.parallel.sync import Sync, SyncOfAll
from herder.parallel.tensor import SplitVocabulary, apply_tensor_parallel
from herder.plan.layout import ZeroStage, sequence_multiple
from herder.plan.training import TrainingPlan


@dataclass(frozen=True)
class Parallel:
    """What a training step must know of the layout it runs in."""

    mesh: DeviceMesh | None = None
    sync: Sync = field(default_factory=SyncOfAll)
    vocabulary: Vocabulary = WHOLE_VOCABULARY
    is_autocast: bool = True
    """Whether products in bf16 are autocast's work; else parameters are gathered in bf16."""
    token_multiple: int = 1
    """Tokens of a micro-batch are a multiple of this."""
    context: Context = WHOLE_CONTEXT
    pipeline: Pipeline | NaiveDataParallel | None = None
    """What takes a step's micro-batches through stages, or over devices; None: each goes through
    this rank's layers alone."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and tells."""
        return self.mesh is None or dist.get_rank() == 0

    def largest(self, number: int) -> int:
        """The largest of what every rank says."""
        if self.mesh is None:
            return number
        told = torch.tensor(number, device=self.mesh.device_type)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return int(told)

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, count): which share of a step's micro-batches is this rank's."""
        return self._place(("dp", "fsdp"))

    @property
    def num_copies(self) -> int:
        """Tensor-parallel ranks, which compute the same loss of the same tokens."""
        return 1 if self.mesh is None else self.mesh["tp"].size()

    def sum_over_data(self, x: Tensor) -> Tensor:
        """The sum over the ranks that have other micro-batches of the same step."""
        for axis in ("dp", "fsdp"):
            self._sum(x, axis)
        return x

    def sum_over_parts(self, x: Tensor) -> Tensor:
        """The sum over ranks that have other tokens or other layers of the same micro-batches."""
        for axis in ("cp", "pp"):
            self._sum(x, axis)
        return x

    def sum_over_all(self, x: Tensor) -> Tensor:
        """The sum over every rank; what ranks have in common they must divide first."""
        if self.mesh is not None:
            dist.all_reduce(x)
        return x

    def squared_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """This rank's share of the gradient's squared norm, in fp32: the sum over all ranks is the
        whole, since what several hold is divided by their number and a tied embedding counts on the
        first pipeline stage alone."""
        sums: dict[int, list[Tensor]] = {}
        tied_copy = None if self.pipeline is None else self.pipeline.tied_copy
        for parameter in parameters:
            if parameter.grad is not None and parameter is not tied_copy:
                held = held_tensor(parameter.grad)
                sums.setdefault(self._num_holders(parameter), []).append(held)
        device = parameters[0].device
        total = torch.zeros((), device=device)
        for num_holders, gradients in sums.items():
            norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
            total += norms.square().sum() / num_holders
        return total

    def _num_holders(self, parameter: nn.Parameter) -> int:
        """How many ranks hold the same part of a parameter."""
        if self.mesh is None:
            return 1
        count = self.mesh.size() // self.mesh["pp"].size()
        if isinstance(parameter, DTensor):
            sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            for placement, size in sizes:
                count //= 1 if placement.is_replicate() else size
        return count

    def _sum(self, x: Tensor, axis: str) -> None:
        if self.mesh is not None and self.mesh[axis].size() > 1:
            dist.all_reduce(x, group=self.mesh[axis].get_group())

    def _place(self, axes: tuple[str, ...]) -> tuple[int, int]:
        index, count = 0, 1
        if self.mesh is not None:
            for part in (self.mesh[axis] for axis in axes):
                index, count = index * part.size() + part.get_local_rank(), count * part.size()
        return index, count


ONE_PROCESS = Parallel()


def apply(
    decoder: Decoder,
    plan: TrainingPlan,
    mesh: DeviceMesh | None,
    *,
    device: torch.device,
    compiled: bool = False,
) -> Parallel:
    """Wrap a decoder built on meta as its plan says, and give it memory, uninitialized, on `device`
    (which may be meta): of each parameter only what this rank holds.

    mesh: of `build_mesh`; None for one process. The order: a pipeline stage is cut out of the model
    first, so that nothing is done to the layers of others; tensor parallelism replaces parameters
    that sharding then splits further; recompute comes before compile, whose graphs then hold it;
    sharding is outside the compiled layers; what watches gradients wants parameters that stay.
    """
    layout, precision, stages = plan.layout, plan.precision, [decoder]
    if mesh is not None and layout.pipeline_parallel_size > 1:
        stages = cut_into_stages(decoder, plan.layers_per_stage, mesh["pp"])
    state, experts = _state_meshes(plan, mesh)
    if experts is not None:
        has_tensor = layout.tensor_parallel_size > 1
        apply_expert_parallel(decoder, experts["ep", "tp"] if has_tensor else experts["ep"])
    if state is not None and layout.tensor_parallel_size > 1:
        apply_tensor_parallel(decoder, state["tp"])
        tie(decoder)
    apply_recompute(decoder.layers, plan.recompute)
    if compiled:
        apply_compile(decoder.layers, device_type=device.type)
    if state is not None and layout.zero_stage > 0:
        for stage in stages:
            apply_sharding(
                stage,
                _shards(state),
                experts=None if experts is None else _shards(experts),
                zero_stage=layout.zero_stage,
                compute=precision.compute,
                reduce=precision.gradients,
            )
    if device.type != "meta":
        for stage in stages:
            materialize(stage, device=device)
    if mesh is None:
        return ONE_PROCESS
    _check_all_split(decoder, mesh)
    return _parallel(stages, plan, mesh, experts, device)


def _parallel(
    stages: Sequence[Decoder],
    plan: TrainingPlan,
    mesh: DeviceMesh,
    experts: DeviceMesh | None,
    device: torch.device,
) -> Parallel:
    """What steps must know of stages that are laid out."""
    layout, config = plan.layout, stages[0].config
    syncs = [_sync(stage, mesh, experts, layout.zero_stage) for stage in stages]
    pipeline = None
    if layout.pipeline_parallel_size > 1:
        pipeline = Pipeline(
            stages,
            syncs,
            mesh["pp"],
            schedule=plan.pipeline_schedule,
            shapes=_shapes(config, plan),
            device=device,
        )
    vocabulary, context = WHOLE_VOCABULARY, WHOLE_CONTEXT
    if layout.tensor_parallel_size > 1:
        vocabulary = SplitVocabulary(config.vocab_size, mesh["tp"])
    if layout.context_parallel_size > 1:
        context = SplitContext(mesh["cp"], plan.context_method)
    return Parallel(
        mesh=mesh,
        sync=SyncOfAll(syncs),
        vocabulary=vocabulary,
        is_autocast=layout.zero_stage == 0,
        token_multiple=sequence_multiple(layout),
        context=context,
        pipeline=pipeline,
    )


def _state_meshes(
    plan: TrainingPlan, mesh: DeviceMesh | None
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Where parameters stand, and those of experts where other ranks hold them."""
    if mesh is None:
        return None, None
    axes, is_sharded = plan.mesh_axes, plan.layout.zero_stage > 0
    made = {"device_type": mesh.device_type, "is_sharded": is_sharded}
    state, experts = mesh, None
    if axes["cp"] > 1:
        state = build_state_mesh(axes, num_expert_ranks=1, **made)
    if axes["ep"] > 1:
        experts = build_state_mesh(axes, num_expert_ranks=axes["ep"], **made)
    return state, experts


def _shards(mesh: DeviceMesh) -> DeviceMesh:
    """The axis of ranks that share a copy of the state out, after that of copies."""
    return mesh["dp", "fsdp"] if mesh["dp"].size() > 1 else mesh["fsdp"]


def _sync(
    stage: Decoder, mesh: DeviceMesh, experts: DeviceMesh | None, zero_stage: ZeroStage
) -> Sync:
    if zero_stage > 0:
        return ShardedState(stage, zero_stage)
    return GradientSync(stage.parameters(), mesh, experts)


def _shapes(config: ArchitectureConfig, plan: TrainingPlan) -> Shapes:
    """What travels between pipeline stages. The residual stream is in the parameters' dtype, which
    is fp32 under autocast and bf16 where they are gathered in it."""
    is_bf16 = plan.layout.zero_stage > 0 and plan.precision.compute == "bf16"
    num_tokens = plan.micro_batch_tokens // plan.layout.context_parallel_size
    has_routers = any(layer.feed_forward == "routed" for layer in config.layers)
    return Shapes(
        num_tokens=plan.micro_batch_tokens,
        num_own_tokens=num_tokens,
        num_rows=num_tokens // plan.layout.tensor_parallel_size,
        hidden_size=config.hidden_size,
        hidden_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        num_carried=num_routing_sums(config.moe) if has_routers else 0,
    )


def _check_all_split(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Under tensor parallelism a plain parameter would have a wrong gradient and no error."""
    if mesh["tp"].size() > 1:
        modules = (module for module in decoder.modules() if leaf_axes(module))
        plain = [
            p for m in modules for p in m.parameters(recurse=False) if not isinstance(p, DTensor)
        ]
        assert not plain, f"{len(plain)} parameters are not placed on the tensor-parallel axis"
