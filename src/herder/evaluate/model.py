"""What an evaluation runs on: the model's weights on a device, and the text it did not train on.

Owns the defaults of both. Knows no task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from herder.checkpoint.huggingface import load_decoder
from herder.checkpoint.metadata import read_meta
from herder.checkpoint.quantizing import load_quantized
from herder.checkpoint.source import ModelSource
from herder.config.quantization import WeightQuantization
from herder.config.run import DataConfig
from herder.data.sources import documents, is_held_out, open_source
from herder.errors import ConfigError
from herder.model.decoder import Decoder

Precision = Literal["fp32", "bf16"]
Split = Literal["validation", "all"]


def load_model(
    source: ModelSource, *, precision: Precision, quantization: WeightQuantization | None = None
) -> Decoder:
    """The model with its weights in `precision`, or what can be quantized in `quantization`, on the
    GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    if quantization is None:
        return load_decoder(source, dtype=dtype, device=device).eval()
    return load_quantized(source, quantization, dtype=dtype, device=device).eval()


def data_of(source: ModelSource) -> DataConfig:
    """The data that a run was trained on; for other models the default."""
    if source.weights != "run" or source.folder is None:
        return DataConfig()
    return DataConfig.model_validate(read_meta(source.folder).config["data"])


def window_tokens(source: ModelSource, sequence_length: int | None) -> int:
    """How long a piece of a document may be: what was asked for, else the model's window."""
    window = source.architecture.max_position_embeddings
    if sequence_length is not None and sequence_length > window:
        raise ConfigError(
            f"--sequence-length {sequence_length} exceeds the model's window of {window} tokens."
        )
    return sequence_length or window


def texts_of(config: DataConfig, *, split: Split) -> Iterator[str]:
    """Documents in order: those that a run with `config` holds out, or all of them."""
    source = open_source(config.source, text_key=config.text_key)
    for text in documents(source, max_documents=config.max_documents):
        if split == "all" or is_held_out(text, fraction=config.validation_fraction):
            yield text
