"""Weights into a decoder from any source, and a decoder out as a Hugging Face folder.

Loading holds one tensor in memory besides the model: each is read straight from its file into the
memory it stays in, or cast on the way. Everything wrong with the files is found from their headers,
and told together, before the first tensor is read.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from herder.checkpoint.directory import writing
from herder.checkpoint.gguf_file import read_gguf
from herder.checkpoint.gguf_metadata import gguf_rules, permuted_heads
from herder.checkpoint.quantized import QuantizedTensor, logical_tensors, read_values
from herder.checkpoint.sharded import load_tensors, read_metadata, refuse_misfits, tensors_of
from herder.checkpoint.source import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
    TOKENIZER_FILES,
    ModelSource,
)
from herder.checkpoint.stored import StoredTensor, stored_tensors
from herder.checkpoint.tensors import PLAIN_DTYPES, halves_from_neighbours
from herder.config.architecture import ArchitectureConfig
from herder.errors import CheckpointError, WeightsError
from herder.families.quantization import read_quantization
from herder.families.registry import architecture_to_hf, family_named
from herder.families.weights import EMBEDDING, HEAD, WeightRule, WeightRules, hub_shape, listed
from herder.model.build import build_decoder, materialize, tie
from herder.model.decoder import Decoder
from herder.units import GB

SHARD_BYTES = 5 * GB
"""A saved model larger than this is cut into files of at most this size (or one tensor)."""


def load_decoder(
    source: ModelSource, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Decoder:
    """The model of a source with its weights, in `dtype` on `device`."""
    decoder = build_decoder(source.architecture, device="meta", dtype=dtype)
    load_weights(decoder, source, device=device)
    return decoder


def stored_dtype(source: ModelSource) -> torch.dtype:
    """The dtype that most of a source's values are stored in: fp32 for GGUF blocks, else bf16
    where they are quantized."""
    totals: Counter[str] = Counter()
    if source.weights == "run":
        sizes = Counter[torch.dtype]()
        for each in tensors_of(read_metadata(source.files)).values():
            sizes[each.properties.dtype] += each.size.numel() * each.properties.dtype.itemsize
        return sizes.most_common(1)[0][0]
    for each in _stored(source).values():
        totals[each.kind] += each.num_bytes
    return PLAIN_DTYPES.get(totals.most_common(1)[0][0], torch.float32)


def _stored(source: ModelSource) -> Mapping[str, StoredTensor | QuantizedTensor]:
    """The tensors of a source by the names they have there."""
    if source.weights is None:
        raise WeightsError(
            f"{source.name} has no weights here: it is a config only. Name a folder, a hub id or a "
            ".gguf file, or train with initialize: random."
        )
    if source.weights == "gguf":
        return read_gguf(source.files[0]).tensors
    quantization = read_quantization(source.config_json, where=source.name)
    return logical_tensors(stored_tensors(source.files), quantization, where=source.name)


def load_weights(
    decoder: Decoder,
    source: ModelSource,
    *,
    device: str | torch.device,
    place: Callable[[Tensor, Tensor], None] | None = None,
) -> None:
    """Fills a decoder, tensor by tensor, in its own dtypes; what is on meta is replaced by real.

    place(live, whole): for a decoder that is sharded, or a stage of one, or that will have other
    parameters; each is put together on the host, handed over and forgotten.

    Raises WeightsError (of a run CheckpointError) that lists everything missing, unknown, misshapen
    or of a dtype that cannot be read. Warns of what the source's notes say.
    """
    for note in source.notes:
        warnings.warn(note, stacklevel=2)
    if source.weights == "run":
        _load_run(decoder, source, device=device, place=place)
        return
    stored = _stored(source)
    rules = family_named(source.family).weight_rules(decoder.config)
    num_heads: Mapping[str, int] = {}
    if source.weights == "gguf":
        rules = gguf_rules(rules)
        num_heads = permuted_heads(read_gguf(source.files[0]), decoder.config)
    live = decoder.state_dict(keep_vars=True)
    whole = live
    if place is not None:
        dtype = next(decoder.layers.parameters()).dtype
        whole = build_decoder(decoder.config, dtype=dtype).state_dict(keep_vars=True)
    wanted = _checked(whole, stored, rules, source.name)
    assembly = None if place is None else _Assembly(decoder, wanted, place)
    with torch.no_grad():
        for theirs, parts in wanted.items():
            if assembly is not None and not assembly.holds(parts):
                continue
            tensor = read_values(stored[theirs], whole[parts[0].ours].dtype)
            name = theirs.split(".")[-2]
            if name in num_heads:
                tensor = halves_from_neighbours(tensor, num_heads=num_heads[name])
            for part in parts:
                if assembly is None:
                    live[part.ours] = _place(decoder, live[part.ours], part, tensor.to(device))
                else:
                    assembly.add(part, tensor, like=whole[part.ours])
    tie(decoder)


def _load_run(
    decoder: Decoder,
    source: ModelSource,
    *,
    device: str | torch.device,
    place: Callable[[Tensor, Tensor], None] | None,
) -> None:
    """From a checkpoint, of which only what this process holds of the decoder is read: into place,
    or one whole tensor after the other where the decoder has no memory yet."""
    stored = read_metadata(source.files)
    is_meta = any(parameter.is_meta for parameter in decoder.parameters())
    if is_meta and place is None:
        materialize(decoder, device=device)
    live = _ours(decoder)
    refuse_misfits(live, stored, where=source.name, is_part=place is not None and not is_meta)
    if place is None or not is_meta:
        load_tensors(live, stored)
        return
    for name, each in live.items():
        whole = torch.empty_like(each, device="cpu")
        load_tensors({name: whole}, stored)
        place(each, whole)
    tie(decoder)


def _ours(decoder: Decoder) -> dict[str, Tensor]:
    """What is saved of a decoder: a tied head is its embedding."""
    live = decoder.state_dict(keep_vars=True)
    is_tied = decoder.config.tie_embeddings
    return {EMBEDDING if is_tied and name == HEAD else name: each for name, each in live.items()}


def _checked(
    live: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor | QuantizedTensor],
    rules: WeightRules,
    name: str,
) -> Mapping[str, tuple[WeightRule, ...]]:
    """What is to be loaded, by their names, once all of it fits."""
    problems: list[str] = []
    try:
        wanted = rules.to_ours(stored, where=name)
    except WeightsError as error:
        problems.append(str(error))
        wanted = {hub: parts for hub, parts in rules.by_hub_name().items() if hub in stored}
    shapes = {ours: tuple(tensor.shape) for ours, tensor in live.items()}
    misshapen = [
        f"{hub} is {list(stored[hub].shape)}, the architecture needs {list(shape)}"
        for hub, parts in wanted.items()
        if stored[hub].shape != (shape := hub_shape(parts, shapes))
    ]
    if misshapen:
        lines = listed(misshapen, separator="\n  ")
        problems.append(f"{name}: {len(misshapen)} tensors have another shape:\n  {lines}")
    if problems:
        raise WeightsError("\n".join(problems))
    return wanted


def _place(decoder: Decoder, live: Tensor, part: WeightRule, tensor: Tensor) -> Tensor:
    """Puts one part of a stored tensor where it belongs, and gives what then is live there.

    What is on the meta device gets memory: the stored tensor's own where that is all of it.
    """
    if live.is_meta:
        module, leaf = part.ours.rsplit(".", 1)
        own = tensor if part.is_whole else torch.empty_like(live, device=tensor.device)
        is_parameter = isinstance(live, nn.Parameter)
        live = nn.Parameter(own, requires_grad=live.requires_grad) if is_parameter else own
        setattr(decoder.get_submodule(module), leaf, live)
        if part.is_whole:
            return live
    (live if part.expert is None else live[part.expert]).copy_(part.part_of(tensor))
    return live


class _Assembly:
    """Parameters of which a decoder holds parts: whole on the host until all of one is there."""

    def __init__(
        self,
        decoder: Decoder,
        wanted: Mapping[str, tuple[WeightRule, ...]],
        place: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._live = decoder.state_dict(keep_vars=True)
        if decoder.config.tie_embeddings and decoder.embed is None and HEAD in self._live:
            self._live[EMBEDDING] = self._live[HEAD]  # the last stage's copy
        self._missing = Counter(part.ours for parts in wanted.values() for part in parts)
        self._whole = dict[str, Tensor]()
        self._place = place

    def holds(self, parts: Sequence[WeightRule]) -> bool:
        """Whether any of these is of this decoder."""
        return any(part.ours in self._live for part in parts)

    def add(self, part: WeightRule, tensor: Tensor, *, like: Tensor) -> None:
        """Take one part of a parameter in that is `like` this when it is whole."""
        name = part.ours
        if name not in self._live:
            return
        if name not in self._whole:
            self._whole[name] = torch.empty_like(like, device="cpu")
        whole = self._whole[name]
        (whole if part.expert is None else whole[part.expert]).copy_(part.part_of(tensor))
        self._missing[name] -= 1
        if self._missing[name] == 0:
            self._place(self._live[name], self._whole.pop(name))


def save_huggingface(
    decoder: Decoder,
    folder: Path,
    *,
    family: str,
    like: ModelSource | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that transformers loads with equal logits; whole, or not at all.

    like: whose token ids, generation defaults and tokenizer files go along. Raises CheckpointError
    when the folder is there already or cannot be written (a full disk): then nothing is left.
    Raises ModelError when the family's class cannot express the architecture.
    """
    live = decoder.state_dict(keep_vars=True)
    _save(decoder.config, live, live.__getitem__, folder, family, like, shard_bytes)


def export_run(
    source: ModelSource, folder: Path, *, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> None:
    """The same of a run's checkpoint, without the model: one of its tensors in memory, and one file
    of the new folder. Raises CheckpointError too where it does not fit its own config.
    """
    for note in source.notes:
        warnings.warn(note, stacklevel=2)
    stored = read_metadata(source.files)
    like = _ours(build_decoder(source.architecture, dtype=dtype))
    refuse_misfits(like, stored, where=source.name, is_part=False)

    @lru_cache(maxsize=1)  # experts that are stacked in one tensor go to many
    def read(name: str) -> Tensor:
        whole = torch.empty_like(like[name], device="cpu")
        load_tensors({name: whole}, stored)
        return whole

    _save(source.architecture, like, read, folder, source.family, source, shard_bytes)


def _save(
    architecture: ArchitectureConfig,
    ours: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    folder: Path,
    family: str,
    like: ModelSource | None,
    shard_bytes: int,
) -> None:
    """ours: the model's tensors, maybe on meta; read: gives each with its values."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already and is not empty. Name another folder.")
    config = architecture_to_hf(architecture, family=family)
    rules = family_named(family).weight_rules(architecture)
    wanted = rules.to_hub(ours, where=f"saving {family}")
    config["dtype"] = str(ours[EMBEDDING].dtype).removeprefix("torch.")
    with writing(folder, num_bytes=sum(tensor.nbytes for tensor in ours.values())) as fresh:
        if like is not None:
            config |= _write_what_goes_along(fresh, like)
        _write_json(fresh / CONFIG, config)
        with torch.no_grad():
            _write_weights(fresh, wanted, ours, read, shard_bytes)


def _write_weights(
    folder: Path,
    wanted: Mapping[str, tuple[WeightRule, ...]],
    ours: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    shard_bytes: int,
) -> None:
    """One file, or several with an index; only one file's tensors are put together at a time."""
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    files: list[list[str]] = []
    room = 0
    for hub, parts in wanted.items():
        num_bytes = prod(hub_shape(parts, shapes)) * ours[parts[0].ours].element_size()
        if num_bytes > room:
            files.append([])
            room = shard_bytes
        files[-1].append(hub)
        room -= num_bytes
    of_many = f"-of-{len(files):05}.safetensors"
    names = [f"model-{n:05}{of_many}" for n in range(1, len(files) + 1)]
    total_size = 0
    for name, hubs in zip(names if len(files) > 1 else [SINGLE], files, strict=True):
        tensors = {hub: _hub_tensor(wanted[hub], ours, read) for hub in hubs}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        weight_map = {hub: name for name, hubs in zip(names, files, strict=True) for hub in hubs}
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        _write_json(folder / INDEX, index)


def _hub_tensor(
    parts: Sequence[WeightRule], ours: Mapping[str, Tensor], read: Callable[[str], Tensor]
) -> Tensor:
    """The hub's tensor out of the parts of ours it holds; a copy only where it is not one of ours.

    A router, which is kept in fp32, is written in the model's dtype where that loses nothing.
    """
    first, own = parts[0], read(parts[0].ours)
    tensor = own.detach() if first.expert is None else own.detach()[first.expert]
    if first.transposed or first.outputs is not None:
        shape = hub_shape(parts, {part.ours: tuple(ours[part.ours].shape) for part in parts})
        tensor = torch.empty(shape, dtype=own.dtype, device=own.device)
        for part in parts:
            part.part_of(tensor).copy_(read(part.ours))
    narrow = tensor.to(ours[EMBEDDING].dtype)
    is_parameter = isinstance(ours[first.ours], nn.Parameter)
    is_lossless = is_parameter and torch.equal(narrow.to(tensor.dtype), tensor)
    return narrow if is_lossless else tensor


def _write_what_goes_along(folder: Path, like: ModelSource) -> dict[str, Any]:
    """Writes generation defaults and tokenizer files; returns the token ids for the config."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    token_ids = {key: like.config_json[key] for key in keys if key in like.config_json}
    given = {key: value for key, value in token_ids.items() if value is not None}
    eos = list(like.eos_token_ids)
    if eos:
        given["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    _write_json(folder / GENERATION_CONFIG, {**like.generation, **given})
    for name in TOKENIZER_FILES:
        if like.folder is not None and (like.folder / name).is_file():
            shutil.copyfile(like.folder / name, folder / name)
    return token_ids


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
