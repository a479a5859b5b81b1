"""Weights into a decoder from any source, and a decoder out as a Hugging Face folder.

One tensor is in memory besides the model, in both directions: each is read straight from its file
into the memory it stays in, or cast on the way. Everything wrong with the files is found from
their headers, and told together, before the first tensor is read.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from herder.checkpoint.directory import fresh_folder
from herder.checkpoint.gguf import GgufTensors
from herder.checkpoint.gguf_file import read_gguf
from herder.checkpoint.gguf_metadata import gguf_rules
from herder.checkpoint.safetensors_header import DTYPE_BYTES, StoredTensor
from herder.checkpoint.source import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
    TOKENIZER_FILES,
    ModelSource,
    stored_tensors,
)
from herder.errors import CheckpointError, WeightsError
from herder.families.registry import architecture_to_hf, family_named
from herder.families.weights import WeightRule, WeightRules
from herder.model.build import build_decoder, tie
from herder.model.decoder import Decoder
from herder.units import GB, format_gb

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
_MOST_LISTED = 12
_READ_BYTES = 1 << 30
SHARD_BYTES = 5 * GB
"""A saved model larger than this is cut into files of at most this size (or one tensor)."""


class TensorReader(Protocol):
    """Tensors by name, one at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor: ...


class SafetensorsReader:
    """Tensors of safetensors files, read into memory of their own rather than mapped."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: each.shape for name, each in tensors.items()}
        self._open: dict[Path, io.FileIO] = {}

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._open.values():
            file.close()

    def read(self, name: str) -> Tensor:
        """One tensor in its stored dtype. Raises WeightsError where the file ends early."""
        stored = self.tensors[name]
        if stored.file not in self._open:
            self._open[stored.file] = io.FileIO(stored.file)
        file = self._open[stored.file]
        tensor = torch.empty(stored.shape, dtype=_TORCH_DTYPES[stored.dtype])
        left = memoryview(_bytes_of(tensor))
        file.seek(stored.start)
        while left:
            count = file.readinto(left[:_READ_BYTES])
            if not count:
                raise WeightsError(f"{stored.file} ends within {name}. Fetch the file again.")
            left = left[count:]
        return tensor


def _bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor on the host, as a numpy array of bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def load_decoder(
    source: ModelSource, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Decoder:
    """The model of a source with its weights, in `dtype` on `device`."""
    decoder = build_decoder(source.architecture, device="meta", dtype=dtype)
    load_weights(decoder, source, dtype=dtype, device=device)
    return decoder


def stored_dtype(source: ModelSource) -> torch.dtype:
    """The dtype that most of a source's values are stored in; fp32 where blocks are quantized."""
    if source.weights is None:
        return torch.float32
    if source.weights == "gguf":
        tensors = read_gguf(source.files[0]).tensors.values()
        kinds = [(each.kind, each.num_bytes) for each in tensors]
    else:
        kinds = [(each.dtype, each.num_bytes) for each in stored_tensors(source.files).values()]
    totals: dict[str, int] = {}
    for kind, num_bytes in kinds:
        totals[kind] = totals.get(kind, 0) + num_bytes
    largest = max(totals, key=lambda kind: totals[kind])
    return _TORCH_DTYPES.get(largest, torch.float32)


def load_weights(
    decoder: Decoder, source: ModelSource, *, dtype: torch.dtype, device: str | torch.device
) -> None:
    """Fills a decoder, tensor by tensor; parameters on the meta device are replaced by real ones.

    Raises WeightsError that lists everything missing, unknown, misshapen or of a dtype that cannot
    be read; the decoder is then untouched. Warns where files and config disagree on tying.
    """
    if source.weights is None:
        raise WeightsError(
            f"{source.name} has no weights here: it is a config only. Name a folder, a hub id or a "
            ".gguf file, or train with initialize: random."
        )
    rules = family_named(source.family).weight_rules(decoder.config)
    if source.weights == "gguf":
        tensors = GgufTensors(read_gguf(source.files[0]), decoder.config)
        _fill(decoder, tensors, gguf_rules(rules), source.name, dtype, device)
    else:
        rules = _own_names(rules) if source.weights == "run" else rules
        with SafetensorsReader(stored_tensors(source.files)) as reader:
            _refuse_dtypes(reader.tensors, source.name)
            _fill(decoder, reader, rules, source.name, dtype, device)
    tie(decoder)
    for note in source.notes:
        warnings.warn(note, stacklevel=2)


def _own_names(rules: WeightRules) -> WeightRules:
    """Rules of files that already use our names: checkpoints of runs."""
    same = tuple(WeightRule(rule.ours, rule.ours, rule.layers) for rule in rules.rules)
    return WeightRules(same, rules.num_layers, rules.tied)


def _refuse_dtypes(tensors: Mapping[str, StoredTensor], name: str) -> None:
    bad = sorted(each for each, stored in tensors.items() if stored.dtype not in DTYPE_BYTES)
    if bad:
        kinds = ", ".join(sorted({tensors[each].dtype for each in bad}))
        raise WeightsError(
            f"{name}: {len(bad)} tensors have dtype {kinds}, which cannot be read ({bad[0]} is "
            f"one). Readable: {', '.join(DTYPE_BYTES)}. Take the unquantized model."
        )


def _fill(
    decoder: Decoder,
    reader: TensorReader,
    rules: WeightRules,
    name: str,
    dtype: torch.dtype,
    device: str | torch.device,
) -> None:
    wanted = _checked(decoder, reader, rules, name)
    with torch.no_grad():
        for hub, ours in wanted.items():
            tensor = reader.read(hub).to(device=device, dtype=dtype)
            live = decoder.get_parameter(ours)
            if live.is_meta:
                _replace(decoder, ours, tensor, requires_grad=live.requires_grad)
            else:
                live.copy_(tensor)


def _checked(
    decoder: Decoder, reader: TensorReader, rules: WeightRules, name: str
) -> dict[str, str]:
    """Hub name -> our name of what is to be loaded, once all of it fits."""
    problems: list[str] = []
    try:
        wanted = rules.to_ours(reader.shapes, where=name)
    except WeightsError as error:
        problems.append(str(error))
        wanted = {hub: ours for hub, ours in rules.pairs().items() if hub in reader.shapes}
    misshapen = [
        f"{hub} is {list(reader.shapes[hub])}, the architecture needs {list(shape)}"
        for hub, ours in wanted.items()
        if reader.shapes[hub] != (shape := tuple(decoder.get_parameter(ours).shape))
    ]
    if misshapen:
        rest = len(misshapen) - _MOST_LISTED
        more = [f"and {rest} more"] if rest > 0 else []
        listed = "\n  ".join([*misshapen[:_MOST_LISTED], *more])
        problems.append(f"{name}: {len(misshapen)} tensors have another shape:\n  {listed}")
    if problems:
        raise WeightsError("\n".join(problems))
    return wanted


def _replace(decoder: Decoder, name: str, tensor: Tensor, *, requires_grad: bool) -> None:
    module, leaf = name.rsplit(".", 1)
    parameter = nn.Parameter(tensor, requires_grad=requires_grad)
    setattr(decoder.get_submodule(module), leaf, parameter)


def save_huggingface(
    decoder: Decoder,
    folder: Path,
    *,
    family: str,
    like: ModelSource | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that transformers loads with equal logits; whole, or not at all.

    like: whose token ids, generation defaults and tokenizer files go along. dtype: cast on the way,
    None keeps each tensor's. Raises CheckpointError when the folder is there already or cannot be
    written (a full disk): then nothing is left. Raises ModelError when the family's class cannot
    express the architecture.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already and is not empty. Name another folder.")
    state = _hub_state(decoder, family)
    dtype_name = str(dtype or next(iter(state.values())).dtype).removeprefix("torch.")
    token_ids = _token_ids(like)
    config = {**architecture_to_hf(decoder.config, family=family), "dtype": dtype_name}
    num_bytes = sum(_stored_bytes(tensor, dtype) for tensor in state.values())
    try:
        fresh = fresh_folder(folder)
        try:
            _write_json(fresh / CONFIG, {**config, **token_ids})
            _write_generation(fresh, like, token_ids)
            _copy_tokenizer(fresh, like)
            _write_weights(fresh, state, dtype, shard_bytes)
            fresh.rename(folder)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(_cannot_write(folder, num_bytes, error)) from error


def _hub_state(decoder: Decoder, family: str) -> dict[str, Tensor]:
    """Hub name -> live parameter, a tied head left out."""
    rules = family_named(family).weight_rules(decoder.config)
    live = dict(decoder.named_parameters())
    names = rules.to_hub(live, where=f"saving a {family} model")
    return {hub: live[ours] for ours, hub in names.items()}


def _token_ids(like: ModelSource | None) -> dict[str, Any]:
    if like is None:
        return {}
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: like.config_json[key] for key in keys if key in like.config_json}


def _write_generation(folder: Path, like: ModelSource | None, token_ids: Mapping[str, Any]) -> None:
    if like is None:
        return
    eos = list(like.eos_token_ids)
    ids = {key: value for key, value in token_ids.items() if value is not None}
    if eos:
        ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    _write_json(folder / GENERATION_CONFIG, {**like.generation, **ids})


def _copy_tokenizer(folder: Path, like: ModelSource | None) -> None:
    if like is None or like.folder is None:
        return
    for name in TOKENIZER_FILES:
        if (like.folder / name).is_file():
            shutil.copyfile(like.folder / name, folder / name)


def _write_weights(
    folder: Path, state: Mapping[str, Tensor], dtype: torch.dtype | None, shard_bytes: int
) -> None:
    shards = _shards(state, dtype, shard_bytes)
    names = [
        f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))
    ]
    names = names if len(shards) > 1 else [SINGLE]
    for name, tensors in zip(names, shards, strict=True):
        write_safetensors(folder / name, tensors, dtype=dtype)
    if len(shards) > 1:
        total = sum(_stored_bytes(tensor, dtype) for tensor in state.values())
        files = {hub: name for name, tensors in zip(names, shards, strict=True) for hub in tensors}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def _shards(
    state: Mapping[str, Tensor], dtype: torch.dtype | None, shard_bytes: int
) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in state.items():
        size = _stored_bytes(tensor, dtype)
        if shards[-1] and held + size > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += size
    return shards


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> None:
    """One safetensors file, written tensor by tensor and forced to the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + _stored_bytes(tensor, dtype)
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype or tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            host = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
            file.write(_bytes_of(host))
        file.flush()
        os.fsync(file.fileno())


def _stored_bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _cannot_write(folder: Path, num_bytes: int, error: OSError) -> str:
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    free = format_gb(shutil.disk_usage(existing).free)
    return (
        f"{folder} could not be written: {error.strerror or error}. It needs "
        f"{format_gb(num_bytes)}, free: {free}. Nothing half-written was left."
    )
