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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from herder.checkpoint.directory import writing
from herder.checkpoint.gguf_file import read_gguf
from herder.checkpoint.gguf_metadata import gguf_rules, permuted_heads
from herder.checkpoint.quantized import QuantizedTensor, logical_tensors, read_values
from herder.checkpoint.source import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, ModelSource
from herder.checkpoint.stored import StoredTensor, stored_tensors
from herder.checkpoint.tensors import PLAIN_DTYPES, halves_from_neighbours
from herder.errors import CheckpointError, WeightsError
from herder.families.quantization import read_quantization
from herder.families.registry import architecture_to_hf, family_named
from herder.families.weights import WeightRules, listed
from herder.model.build import build_decoder, tie
from herder.model.decoder import Decoder
from herder.units import GB

SHARD_BYTES = 5 * GB
"""A saved model larger than this is cut into files of at most this size (or one tensor)."""


def load_decoder(
    source: ModelSource, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Decoder:
    """The model of a source with its weights, in `dtype` on `device`."""
    decoder = build_decoder(source.architecture, device="meta", dtype=dtype)
    load_weights(decoder, source, dtype=dtype, device=device)
    return decoder


def stored_dtype(source: ModelSource) -> torch.dtype:
    """The dtype that most of a source's values are stored in: fp32 for GGUF blocks, else bf16
    where they are quantized."""
    totals: Counter[str] = Counter()
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
    decoder: Decoder, source: ModelSource, *, dtype: torch.dtype, device: str | torch.device
) -> None:
    """Fills a decoder, tensor by tensor; parameters on the meta device are replaced by real ones.

    Raises WeightsError that lists everything missing, unknown, misshapen or of a dtype that cannot
    be read; the decoder is then untouched. Warns where files and config disagree on tying.
    """
    stored = _stored(source)
    rules = family_named(source.family).weight_rules(decoder.config)
    num_heads: Mapping[str, int] = {}
    if source.weights == "gguf":
        rules = gguf_rules(rules)
        num_heads = permuted_heads(read_gguf(source.files[0]), decoder.config)
    elif source.weights == "run":
        rules = rules.of_ours()
    wanted = _checked(decoder, stored, rules, source.name)
    with torch.no_grad():
        for theirs, ours in wanted.items():
            tensor = read_values(stored[theirs], dtype).to(device)
            part = theirs.split(".")[-2]
            if part in num_heads:
                tensor = halves_from_neighbours(tensor, num_heads=num_heads[part])
            live = decoder.get_parameter(ours)
            if live.is_meta:
                _replace(decoder, ours, tensor, requires_grad=live.requires_grad)
            else:
                live.copy_(tensor)
    tie(decoder)
    for note in source.notes:
        warnings.warn(note, stacklevel=2)


def _checked(
    decoder: Decoder,
    stored: Mapping[str, StoredTensor | QuantizedTensor],
    rules: WeightRules,
    name: str,
) -> dict[str, str]:
    """Their name -> our name of what is to be loaded, once all of it fits."""
    problems: list[str] = []
    try:
        wanted = rules.to_ours(stored, where=name)
    except WeightsError as error:
        problems.append(str(error))
        wanted = {theirs: ours for theirs, ours in rules.pairs().items() if theirs in stored}
    misshapen = [
        f"{theirs} is {list(stored[theirs].shape)}, the architecture needs {list(shape)}"
        for theirs, ours in wanted.items()
        if stored[theirs].shape != (shape := tuple(decoder.get_parameter(ours).shape))
    ]
    if misshapen:
        lines = listed(misshapen, separator="\n  ")
        problems.append(f"{name}: {len(misshapen)} tensors have another shape:\n  {lines}")
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
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that transformers loads with equal logits; whole, or not at all.

    like: whose token ids, generation defaults and tokenizer files go along. Raises CheckpointError
    when the folder is there already or cannot be written (a full disk): then nothing is left.
    Raises ModelError when the family's class cannot express the architecture.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already and is not empty. Name another folder.")
    config = architecture_to_hf(decoder.config, family=family)
    live = dict(decoder.named_parameters())
    names = family_named(family).weight_rules(decoder.config).to_hub(live, where=f"saving {family}")
    state: dict[str, Tensor] = {hub: live[ours].detach() for ours, hub in names.items()}
    config["dtype"] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    with writing(folder, num_bytes=sum(tensor.nbytes for tensor in state.values())) as fresh:
        if like is not None:
            config |= _write_what_goes_along(fresh, like)
        _write_json(fresh / CONFIG, config)
        save_torch_state_dict(state, fresh, max_shard_size=shard_bytes, metadata={"format": "pt"})
        for path in fresh.glob("*.safetensors"):
            path.chmod(0o644)


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
