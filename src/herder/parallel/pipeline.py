"""Pipeline parallelism: a decoder cut into stages, and the schedules that micro-batches go by.

A stage is the same decoder with the other layers deleted, its embedding, or its norm and head, set
to None. Owns the cut, the shapes that travel between stages, and whatever of a step concerns all
stages: when their gradients are summed, and those of an embedding that the first and the last both
hold. What a stage computes of a micro-batch is told by the work that is handed in. The order of
forwards and backwards is torch's.

Legend: T packed tokens, D hidden, S sums that travel with a micro-batch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from herder.model.decoder import Decoder
from herder.parallel.shards import held_tensor
from herder.parallel.sync import Sync
from herder.plan.pipeline import Schedule

_SCHEDULES: dict[Schedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class Work(Protocol):
    """One micro-batch, and what stages compute of it. A plain class: torch takes tuples and
    dataclasses apart."""

    @property
    def tokens_T(self) -> Tensor:
        """What goes into the first stage."""

    def forward(
        self, decoder: Decoder, x: Tensor, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A stage's hidden_TD and carried_S; of the last stage, what is differentiated, and None.

        x: the tokens on the first stage, else the hidden_TD of the one before. carried: sums over
        all stages so far, with gradient; None where nothing is carried.
        """


@dataclass(frozen=True)
class Shapes:
    """What travels between stages, as one rank has it."""

    num_tokens: int
    """Of a micro-batch."""
    num_own_tokens: int
    """Of them, those of this rank: context parallelism splits them."""
    num_rows: int
    """Of its hidden states here: tensor parallelism splits them too."""
    hidden_size: int
    hidden_dtype: torch.dtype
    num_carried: int
    """Sums that travel along in fp32, or 0."""


def cut_into_stages(
    decoder: Decoder, layers_per_stage: Sequence[int], mesh: DeviceMesh
) -> list[Decoder]:
    """Delete what other pipeline ranks hold, and give this rank's stages, first one first.

    One stage is the decoder itself. Several are views of it, of which each has some of its modules.
    mesh: of the pipeline's axis; stage s is that of its rank s modulo ranks.
    """
    rank, num_ranks = mesh.get_local_rank(), mesh.size()
    num_stages = len(layers_per_stage)
    bounds = list(pairwise(accumulate(layers_per_stage, initial=0)))
    own = range(rank, num_stages, num_ranks)
    layers = {stage: [str(index) for index in range(*bounds[stage])] for stage in own}
    for name in set(decoder.layers).difference(*layers.values()):
        del decoder.layers[name]
    if rank != 0:
        decoder.embed = None
    if rank != num_ranks - 1:
        decoder.norm = decoder.head = None
    if len(own) == 1:
        return [decoder]
    return [view_of_stage(decoder, layers[stage], stage, num_stages) for stage in own]


def view_of_stage(decoder: Decoder, layers: Sequence[str], stage: int, num_stages: int) -> Decoder:
    """A decoder that shares these modules with another one, but nothing registered on itself."""
    view = copy.copy(decoder)
    for name, value in vars(view).items():
        if isinstance(value, dict):
            setattr(view, name, value.copy())
    view.layers = nn.ModuleDict({name: decoder.layers[name] for name in layers})
    if stage != 0:
        view.embed = None
    if stage != num_stages - 1:
        view.norm = view.head = None
    return view


class Pipeline:
    """A rank's stages, and the schedules that bring a step's micro-batches through them."""

    def __init__(
        self,
        stages: Sequence[Decoder],
        syncs: Sequence[Sync],
        mesh: DeviceMesh,
        *,
        schedule: Schedule,
        shapes: Shapes,
        device: torch.device,
    ) -> None:
        """syncs: one a stage. mesh: of the pipeline's axis."""
        self._stages = stages
        self._syncs = syncs
        self._group = mesh.get_group()
        self._rank, self._num_ranks = mesh.get_local_rank(), mesh.size()
        self._schedule = schedule
        self._shapes = shapes
        self._device = device
        self._made: dict[tuple[bool, int], _Run] = {}

    @property
    def num_forwards(self) -> int:
        """How many micro-batches `run_forward` wants: enough to keep every stage at work."""
        return 2 * self._num_ranks

    @property
    def num_tokens(self) -> int:
        """Of every micro-batch."""
        return self._shapes.num_tokens

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The last stage's copy of a tied embedding, on the rank that has it."""
        head = self._stages[-1].head
        if head is None or not self._stages[-1].config.tie_embeddings:
            return None
        return head.get_parameter("weight")

    def run(self, works: Sequence[Work]) -> None:
        """Forward and backward of a step's micro-batches; gradients are sums over all ranks then.

        Every rank of the pipeline is given the same micro-batches.
        """
        self._run(works, is_trained=True)
        for sync in self._syncs:
            sync.finish()
        if self._stages[0].config.tie_embeddings:
            self._sum_tied()

    def run_forward(self, works: Sequence[Work]) -> None:
        """The forwards alone, without gradients."""
        with torch.no_grad():
            self._run(works, is_trained=False)

    def _run(self, works: Sequence[Work], *, is_trained: bool) -> None:
        key = is_trained, len(works)
        if key not in self._made:
            self._made[key] = self._make(len(works), is_trained=is_trained)
        self._made[key].step(works)

    def _make(self, num_micro_batches: int, *, is_trained: bool) -> _Run:
        # torch prints a schedule, an action a line, beside every error that it raises.
        logging.getLogger(ScheduleInterleaved1F1B.__module__).setLevel(logging.CRITICAL)
        num_chunks = len(self._stages)
        num_carried = self._shapes.num_carried if is_trained else 0
        splits_backward = self._schedule == "zero_bubble"
        stages = [
            _TorchStage(
                _StageModule(decoder, num_carried),
                chunk * self._num_ranks + self._rank,
                num_chunks * self._num_ranks,
                shapes=self._shapes,
                sync=sync,
                splits_backward=splits_backward,
                device=self._device,
                group=self._group,
            )
            for chunk, (decoder, sync) in enumerate(zip(self._stages, self._syncs, strict=True))
        ]
        kind = _SCHEDULES[self._schedule]
        if not is_trained:
            kind = ScheduleGPipe if num_chunks == 1 else ScheduleLoopedBFS
        schedule = kind(
            stages[0] if num_chunks == 1 else stages,
            num_micro_batches,
            loss_fn=_same if is_trained else None,
            **({"scale_grads": False} if is_trained else {}),
        )
        return _Run(schedule, stages, is_trained=is_trained)

    def _sum_tied(self) -> None:
        """Both copies of a tied embedding get the sum of their gradients, and so stay equal."""
        ends = {0: self._num_ranks - 1, self._num_ranks - 1: 0}
        if self._rank not in ends:
            return
        embed, copied = self._stages[0].embed, self.tied_copy
        parameter = copied if embed is None else embed.get_parameter("weight")
        assert parameter is not None, "an end of the pipeline without embedding and head"
        assert parameter.grad is not None, "a tied embedding without a gradient"
        own, peer = held_tensor(parameter.grad), ends[self._rank]
        other = torch.empty_like(own, memory_format=torch.contiguous_format)
        transfers = [
            dist.P2POp(dist.isend, own.contiguous(), group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
        ]
        for transfer in dist.batch_isend_irecv(transfers):
            transfer.wait()
        own.add_(other)


class _Run:
    """One of torch's schedules for some number of micro-batches, which it takes as a list: torch's
    own entry would cut whole batches, which documents do not allow."""

    def __init__(self, schedule: Any, stages: Sequence[_TorchStage], *, is_trained: bool) -> None:
        self._schedule = schedule
        self._stages = stages
        self._is_trained = is_trained

    def step(self, works: Sequence[Work]) -> None:
        """What `step` of torch's schedules does, after the cut."""
        for stage in self._stages:
            stage.has_backward = self._is_trained
            stage.clear_runtime_states()
        has_first = any(stage.is_first for stage in self._stages)
        has_last = any(stage.is_last for stage in self._stages)
        self._schedule._step_microbatches(
            [(work.tokens_T,) if has_first else () for work in works],
            [{"work": work} for work in works],
            [None] * len(works) if has_last and self._is_trained else None,
            None,
            False,
        )
        for stage in self._stages:
            stage.clear_runtime_states()


class _StageModule(nn.Module):
    """A stage as torch's pipeline calls it: tensors in, tensors out, and the work beside."""

    def __init__(self, decoder: Decoder, num_carried: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.num_carried = num_carried

    def forward(self, x: Tensor, carried: Tensor | None = None, *, work: Work) -> Any:
        """hidden_TD, and carried_S where sums travel; of the last stage, what work makes of it."""
        if self.num_carried and carried is None:
            carried = torch.zeros(self.num_carried, dtype=torch.float32, device=x.device)
        out, carried = work.forward(self.decoder, x, carried)
        return out if carried is None else (out, carried)


class _TorchStage(PipelineStage):
    """torch's stage with shapes known, so that it need not run the model to find them, and with our
    own say in when gradients are summed."""

    def __init__(
        self,
        module: _StageModule,
        index: int,
        num_stages: int,
        *,
        shapes: Shapes,
        sync: Sync,
        splits_backward: bool,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        made = {"device": "meta", "requires_grad": True}
        hidden_TD = torch.empty(
            shapes.num_rows, shapes.hidden_size, dtype=shapes.hidden_dtype, **made
        )
        between = [hidden_TD]
        if module.num_carried:
            between.append(torch.empty(module.num_carried, dtype=torch.float32, **made))
        tokens_T = torch.empty(shapes.num_own_tokens, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.float32, **made)
        super().__init__(
            module,
            index,
            num_stages,
            device,
            input_args=(tokens_T,) if index == 0 else tuple(between),
            output_args=(loss,) if index == num_stages - 1 else tuple(between),
            group=group,
        )
        self._sync = sync
        self._splits_backward = splits_backward

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """One backward of a micro-batch.

        In two passes it does not run through the hooks that sum gradients: `finish` of the sync
        sums them then.
        """
        self._sync.expect_last(is_last=last_backward and not self._splits_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the sync's work."""


def _same(loss: Tensor, _target: None) -> Tensor:
    """The last stage gives the loss itself."""
    return loss
