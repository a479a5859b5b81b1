"""A run, built and ready: everything the loop reads, in one frozen record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.optim import AdamW

from herder.checkpoint.metadata import ExperimentMeta
from herder.checkpoint.run import (
    DataPosition,
    Progress,
    TrainSources,
    TrainTensors,
    whole_sources,
)
from herder.checkpoint.stream import TensorSource
from herder.config.run import RunConfig
from herder.data.batch import MicroBatch
from herder.families.weights import EMBEDDING, HEAD
from herder.model.decoder import Decoder
from herder.parallel.collect import Collector
from herder.train.optimizer import optimizer_tensors
from herder.train.step import StepSettings


def saved_buffers(decoder: Decoder) -> dict[str, Tensor]:
    """Buffers that are state, such as a router's correction_bias, by name."""
    state = decoder.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in decoder.named_buffers() if name in state}


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """What the loop needs. Decoder and optimizer change in place; nothing else does."""

    config: RunConfig
    """With planned values filled in."""
    run_directory: Path
    decoder: Decoder
    optimizer: AdamW
    micro_batches: Callable[[int], Sequence[MicroBatch]]
    """This rank's micro-batches of a step, counted from 0; a pure function."""
    held_out: Callable[[], Sequence[MicroBatch]]
    """The held-out text, up to evaluate.max_tokens."""
    corpus: str
    """The fingerprint of the documents."""
    step_tokens: int
    """Tokens a step reads, padding included."""
    settings: StepSettings
    meta: ExperimentMeta
    model_files: Mapping[str, bytes]
    """What makes a checkpoint loadable as a model, by file name."""
    flops_per_token: float
    peak_flops_per_second: float | None
    peak_source: str

    def tensors(self) -> TrainTensors:
        """All state that this rank holds, live, by the names it has in one process."""
        named = [(self._name(name), each) for name, each in self.decoder.named_parameters()]
        state = {**dict(named), **saved_buffers(self.decoder)}
        return TrainTensors(
            model={name: tensor.detach() for name, tensor in state.items()},
            optimizer=optimizer_tensors(self.optimizer, named),
            is_part=len(self.decoder.layers) < self.decoder.config.num_layers,
        )

    def sources(self) -> TrainSources:
        """All state of the run, to be read whole: on several ranks by all of them together."""
        tensors, mesh = self.tensors(), self.settings.parallel.mesh
        if mesh is None:
            return whole_sources(tensors)
        model, optimizer = (Collector(each, mesh) for each in (tensors.model, tensors.optimizer))
        return TrainSources(
            TensorSource(model.shapes, model.read), TensorSource(optimizer.shapes, optimizer.read)
        )

    def _name(self, name: str) -> str:
        """The last pipeline stage's copy of a tied embedding is not a parameter of its own."""
        is_copy = name == HEAD and self.decoder.config.tie_embeddings
        return EMBEDDING if is_copy else name

    def progress(self, *, step: int, tokens: int) -> Progress:
        """How far the run is after `step` steps."""
        train = self.config.train
        return Progress(
            step=step,
            tokens=tokens,
            data=DataPosition(corpus=self.corpus, seed=train.seed, step=step),
            schedule={"steps": train.steps, **train.schedule.model_dump(mode="json")},
        )
