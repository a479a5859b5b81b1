"""From a config and a model's source to a run that is ready: data, weights, optimizer, settings.

Composition only: what is built is owned by the packages it comes from.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from herder.checkpoint.huggingface import load_weights
from herder.checkpoint.metadata import ExperimentMeta, config_hash, source_commit
from herder.checkpoint.source import ModelSource
from herder.config.catalog import cluster_gpu
from herder.config.machine import describe_host
from herder.config.run import EvaluateConfig, RunConfig
from herder.data.batch import MicroBatch
from herder.data.corpus import DocumentTokens, prepare_corpus
from herder.data.dataset import TokenDataset
from herder.data.order import epoch_order
from herder.data.packing import PackedRows
from herder.data.tokenizer import check_vocabulary, load_tokenizer
from herder.errors import DataError
from herder.model.build import build_decoder, initialize_weights
from herder.model.decoder import Decoder
from herder.parallel.apply import Parallel, apply
from herder.parallel.naive import NaiveDataParallel
from herder.parallel.shards import copy_part
from herder.parallel.turns import first_rank_decides, first_rank_first
from herder.plan.training import TrainingPlan
from herder.train.device import num_devices, peak_flops_per_second
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
    mesh: DeviceMesh | None = None,
    is_resumed: bool,
) -> TrainRun:
    """Everything the loop needs, for a config whose planned values are filled in.

    mesh: the plan's, where it has more than one rank: all of them call this together. The
    parameters of a resumed run are left as they come, since its checkpoint overwrites them all.
    """
    train = config.train
    assert train.micro_batch_size is not None, "the plan fills in train.micro_batch_size"
    assert train.global_batch_tokens is not None, "the plan fills in train.global_batch_tokens"
    text = load_tokenizer(tokenizer)
    check_vocabulary(text, vocab_size=source.architecture.vocab_size, model=source.name)
    with first_rank_first():  # which fills the cache that the others read
        corpus = prepare_corpus(config.data, text)
    dataset = TokenDataset(
        _rows(corpus.train, train.sequence_length),
        micro_batch_size=train.micro_batch_size,
        global_batch_tokens=train.global_batch_tokens,
        seed=train.seed,
    )
    decoder, parallel = build_model(
        config, source, plan, device=device, mesh=mesh, is_resumed=is_resumed
    )
    shard = dict(zip(("shard_index", "num_shards"), parallel.data_shard, strict=True))
    peak, peak_source = _peak(config, plan, device)
    return TrainRun(
        config=config,
        run_directory=Path(config.run_directory),
        decoder=decoder,
        optimizer=build_optimizer(decoder.named_parameters(), train.optimizer),
        micro_batches=partial(dataset.micro_batches, **shard),
        held_out=_held_out(
            corpus.validation, config.evaluate, train.sequence_length, train.micro_batch_size
        ),
        corpus=corpus.fingerprint,
        earlier_corpora=corpus.earlier_fingerprints,
        step_tokens=train.global_batch_tokens,
        settings=StepSettings(
            device=device,
            precision=train.precision,
            loss_chunk_tokens=train.loss_chunk_tokens,
            clip_norm=train.clip_norm,
            parallel=parallel,
        ),
        meta=build_meta(config, source, plan, corpus=corpus.fingerprint),
        model_files=model_files(source, tokenizer),
        flops_per_token=plan.flops_per_token,
        peak_flops_per_second=peak,
        peak_source=peak_source,
    )


def _peak(config: RunConfig, plan: TrainingPlan, device: torch.device) -> tuple[float, str]:
    """(FLOP/s of all ranks, where the figure is from)."""
    with first_rank_first():  # which measures it on a CPU
        peak, source = peak_flops_per_second(
            device,
            cluster_gpu(plan.cluster),
            precision=config.train.precision,
            run_directory=Path(config.run_directory),
        )
    return peak * plan.layout.num_ranks, source


def build_model(
    config: RunConfig,
    source: ModelSource,
    plan: TrainingPlan,
    *,
    device: torch.device,
    mesh: DeviceMesh | None,
    is_resumed: bool,
) -> tuple[Decoder, Parallel]:
    """The decoder laid out by its plan, with its weights: fp32 parameters, of which each rank only
    ever has its part."""
    decoder = build_decoder(source.architecture)
    parallel = apply(decoder, plan, mesh, device=device, compiled=config.train.compile)
    if config.layout == "naive":
        naive = NaiveDataParallel(
            decoder, num_tokens=plan.micro_batch_tokens, num_devices=num_devices(device)
        )
        parallel = replace(parallel, pipeline=naive)
    if not is_resumed and config.model.initialize == "pretrained":
        load_weights(decoder, source, device=device, place=copy_part)
    elif not is_resumed:
        initialize_weights(decoder, seed=config.train.seed, place=copy_part)
    return decoder.train(), parallel


def build_meta(
    config: RunConfig, source: ModelSource, plan: TrainingPlan | None, corpus: str | None = None
) -> ExperimentMeta:
    """What this run is made of, as of step 0; a converted model has no plan.

    All ranks call it together: the first one's machine and source are told.
    """
    commit, hardware = first_rank_decides(lambda: (source_commit(), describe_host()))
    if plan is not None:
        hardware |= {"num_nodes": plan.cluster.nodes, "num_ranks": plan.layout.num_ranks}
    settings = config.model_dump(mode="json")
    return ExperimentMeta(
        model=source.name,
        family=source.family,
        architecture=source.architecture.model_dump(mode="json"),
        config=settings,
        config_hash=config_hash(settings),
        plan={} if plan is None else plan.model_dump(mode="json"),
        corpus=corpus,
        git_commit=commit,
        versions=_versions(),
        hardware=hardware,
        step=0,
        unix_seconds=time.time(),
    )


def _versions() -> dict[str, str]:
    """Of what may change what a run computes, reads or writes."""
    packages = ("herder", "numpy", "safetensors", "tokenizers")
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: importlib.metadata.version(name) for name in packages},
    }
    if torch.cuda.is_available():
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        if torch.distributed.is_nccl_available():
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


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
