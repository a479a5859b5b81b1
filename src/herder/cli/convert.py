"""`herder convert`: one form of a model into another. Composition only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from herder.checkpoint.huggingface import (
    export_run,
    load_decoder,
    save_huggingface,
    stored_dtype,
)
from herder.checkpoint.run import CheckpointWriter, DataPosition, Progress, TrainTensors
from herder.checkpoint.source import ModelSource
from herder.cli.models import resolve, tokenizer_folder
from herder.config.run import ModelConfig, RunConfig
from herder.errors import CheckpointError
from herder.model.decoder import Decoder
from herder.serve.load import DTYPES
from herder.train.build import build_meta
from herder.train.source import model_files
from herder.train.state import saved_buffers


@click.command("convert")
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "form",
    type=click.Choice(["huggingface", "run"]),
    help="Default: a run directory from a Hugging Face folder, else a Hugging Face folder.",
)
@click.option(
    "--precision",
    type=click.Choice(list(DTYPES)),
    help="Of the tensors written. Default: as stored; fp32 from quantized blocks.",
)
def command(source: str, target: Path, form: str | None, precision: str | None) -> None:
    """Write SOURCE, in another form, to the new folder TARGET.

    SOURCE is a Hugging Face folder or hub id, a .gguf file or a run directory (its newest
    checkpoint). The tokenizer and the chat template come along.
    """
    found = resolve(source)
    dtype = DTYPES[precision] if precision else stored_dtype(found)
    if found.weights == "gguf":
        found = replace(found, folder=tokenizer_folder(found))
    if form == "run" or (form is None and found.weights == "safetensors"):
        _write_run(load_decoder(found, dtype=dtype), found, source, target)
    elif found.weights == "run":
        export_run(found, target, dtype=dtype)
    else:
        save_huggingface(load_decoder(found, dtype=dtype), target, family=found.family, like=found)
    click.echo(f"{found.name} is in {target}", err=True)


def _write_run(decoder: Decoder, found: ModelSource, reference: str, target: Path) -> None:
    """A run at step 0, without an optimizer's state: a model to evaluate, serve or start from."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists already and is not empty. Name another folder.")
    assert found.folder is not None, "what has weights has a folder by now"
    config = RunConfig(run_directory=str(target), model=ModelConfig(source=reference))
    model = {**dict(decoder.named_parameters()), **saved_buffers(decoder)}
    tensors = TrainTensors(model=model, optimizer={})
    begun = CheckpointWriter(tensors).save(
        target,
        tensors,
        progress=Progress(
            step=0, tokens=0, data=DataPosition(corpus="", seed=0, step=0), schedule={}
        ),
        meta=build_meta(config, found, None),
        model_files=model_files(found, found.folder),
        policy=config.checkpoint,
    )
    begun.result()
