"""From a config and a model's source to a run that is ready: data, weights, optimizer, settings.

Composition only: what is built is owned by the packages it comes from.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from herder.checkpoint.huggingface import load_weights
from herder.checkpoint.metadata import ExperimentMeta, config_hash, source_commit
from herder.checkpoint.source import ModelSource
from herder.config.catalog import cluster_gpu
from herder.config.run import EvaluateConfig, RunConfig
from herder.data.batch import MicroBatch
from herder.data.corpus import DocumentTokens, prepare_corpus
from herder.data.dataset import TokenDataset
from herder.data.order import epoch_order
from herder.data.packing import PackedRows
from herder.data.tokenizer import check_vocabulary, load_tokenizer
from herder.errors import DataError
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.decoder import Decoder
from herder.parallel.compile import apply_compile
from herder.parallel.recompute import apply_recompute
from herder.plan.training import TrainingPlan
from herder.train.device import peak_flops_per_second
from herder.train.optimizer import build_optimizer
from herder.train.source import model_files
from herder.train.state import TrainRun
from herder.train.step import StepSettings


def build_run(
    config: RunConfig,
    source: ModelSource,
    *,
    tokenizer: Path,
    plan: TrainingPlan,
    device: torch.device,
    is_resumed: bool,
) -> TrainRun:
    """Everything the loop needs, for a config whose planned values are filled in.

    The parameters of a resumed run are left as they come, since its checkpoint overwrites them all.
    """
    train = config.train
    assert train.micro_batch_size is not None, "the plan fills in train.micro_batch_size"
    assert train.global_batch_tokens is not None, "the plan fills in train.global_batch_tokens"
    text = load_tokenizer(tokenizer)
    check_vocabulary(text, vocab_size=source.architecture.vocab_size, model=source.name)
    corpus = prepare_corpus(config.data, text)
    dataset = TokenDataset(
        _rows(corpus.train, train.sequence_length),
        micro_batch_size=train.micro_batch_size,
        global_batch_tokens=train.global_batch_tokens,
        seed=train.seed,
    )
    decoder = build_model(config, source, device=device, is_resumed=is_resumed)
    run_directory = Path(config.run_directory)
    peak, peak_source = peak_flops_per_second(
        device, cluster_gpu(plan.cluster), precision=train.precision, run_directory=run_directory
    )
    return TrainRun(
        config=config,
        run_directory=run_directory,
        decoder=decoder,
        optimizer=build_optimizer(decoder.named_parameters(), train.optimizer),
        micro_batches=dataset.micro_batches,
        held_out=_held_out(
            corpus.validation, config.evaluate, train.sequence_length, train.micro_batch_size
        ),
        corpus=corpus.fingerprint,
        step_tokens=train.global_batch_tokens,
        settings=StepSettings(
            device=device,
            precision=train.precision,
            loss_chunk_tokens=train.loss_chunk_tokens,
            clip_norm=train.clip_norm,
        ),
        meta=build_meta(config, source, plan),
        model_files=model_files(source, tokenizer),
        flops_per_token=plan.flops_per_token,
        peak_flops_per_second=peak,
        peak_source=peak_source,
    )


def build_model(
    config: RunConfig, source: ModelSource, *, device: torch.device, is_resumed: bool
) -> Decoder:
    """The decoder with its weights, recompute and compile applied; fp32 parameters throughout."""
    decoder = build_decoder(source.architecture)
    if not is_resumed and config.model.initialize == "pretrained":
        load_weights(decoder, source, device=device)
    else:
        materialize(decoder, device=device)
        if not is_resumed:
            initialize_weights(decoder, seed=config.train.seed)
    apply_recompute(decoder.layers, config.train.recompute)
    if config.train.compile:
        apply_compile(decoder.layers, device_type=device.type)
    return decoder.train()


def build_meta(config: RunConfig, source: ModelSource, plan: TrainingPlan | None) -> ExperimentMeta:
    """What this run is made of, as of step 0; a converted model has no plan."""
    settings = config.model_dump(mode="json")
    return ExperimentMeta(
        model=source.name,
        family=source.family,
        architecture=source.architecture.model_dump(mode="json"),
        config=settings,
        config_hash=config_hash(settings),
        plan={} if plan is None else plan.model_dump(mode="json"),
        git_commit=source_commit(),
        versions={
            "herder": importlib.metadata.version("herder"),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
        step=0,
        unix_seconds=time.time(),
    )


def _rows(documents: DocumentTokens, sequence_length: int) -> PackedRows:
    return PackedRows(documents.tokens, documents.offsets, sequence_length=sequence_length)


def _held_out(
    documents: DocumentTokens, evaluate: EvaluateConfig, sequence_length: int, batch_size: int
) -> Callable[[], Sequence[MicroBatch]]:
    """Makes the held-out micro-batches, the same ones each time.

    Raises DataError at once where evaluation is asked for and nothing is held out.
    """
    rows = _rows(documents, sequence_length)
    if evaluate.every_steps is not None and rows.num_rows == 0:
        raise DataError(
            "evaluate.every_steps: no documents were held out. Raise data.validation_fraction, or "
            "--set evaluate.every_steps=null."
        )
    # Any share of them is like the whole: the first rows packed hold the longest documents.
    order = epoch_order(rows.num_rows, seed=0, epoch=0)
    chosen = order[: max(1, evaluate.max_tokens // sequence_length)]
    return partial(_micro_batches, rows, chosen, batch_size)


def _micro_batches(
    rows: PackedRows, chosen: NDArray[np.int64], batch_size: int
) -> list[MicroBatch]:
    starts = range(0, len(chosen), batch_size)
    return [rows.micro_batch(chosen[start : start + batch_size]) for start in starts]
