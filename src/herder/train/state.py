"""A run, built and ready: everything the loop reads, in one frozen record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.optim import AdamW

from herder.checkpoint.metadata import ExperimentMeta
from herder.checkpoint.run import DataPosition, Progress, TrainTensors
from herder.config.run import RunConfig
from herder.data.batch import MicroBatch
from herder.families.weights import EMBEDDING, HEAD
from herder.model.decoder import Decoder
from herder.train.optimizer import optimizer_tensors
from herder.train.step import StepSettings


def saved_buffers(decoder: Decoder) -> dict[str, Tensor]:
    """Buffers that are state, such as a router's correction_bias, by name."""
    state = decoder.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in decoder.named_buffers() if name in state}


def state_tensors(decoder: Decoder, optimizer: AdamW, *, has_copies: bool = True) -> TrainTensors:
    """All state that this rank holds, live, by the names it has in one process.

    has_copies: with the last pipeline stage's tied embedding, which the first one has too.
    """
    is_tied = decoder.config.tie_embeddings
    named = [
        (EMBEDDING if name == HEAD and is_tied else name, each)
        for name, each in decoder.named_parameters()
        if has_copies or name != HEAD or not is_tied
    ]
    model = {**dict(named), **saved_buffers(decoder)}
    return TrainTensors(
        model={name: tensor.detach() for name, tensor in model.items()},
        optimizer=optimizer_tensors(optimizer, named),
        is_part=len(decoder.layers) < decoder.config.num_layers,
    )


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
    earlier_corpora: tuple[str, ...] = ()
    """What older versions called it."""
    step_tokens: int
    """Tokens a step reads, padding included."""
    settings: StepSettings
    meta: ExperimentMeta
    model_files: Mapping[str, bytes]
    """What makes a checkpoint loadable as a model, by file name."""
    flops_per_token: float
    peak_flops_per_second: float | None
    peak_source: str

    def progress(self, *, step: int, tokens: int) -> Progress:
        """How far the run is after `step` steps."""
        train = self.config.train
        return Progress(
            step=step,
            tokens=tokens,
            data=DataPosition(corpus=self.corpus, seed=train.seed, step=step),
            schedule={"steps": train.steps, **train.schedule.model_dump(mode="json")},
        )
