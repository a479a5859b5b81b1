"""Where a model comes from: a name, folder, hub id, GGUF file or run, resolved to one record.

Reads configs, headers and metadata, never a weight's values (but to see whether a tied model's two
matrices are one). Imports no torch: planning starts here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from herder.checkpoint import gguf_metadata, hub
from herder.checkpoint.directory import CHECKPOINTS, newest_checkpoint
from herder.checkpoint.gguf_file import read_gguf
from herder.checkpoint.metadata import META, differing_keys, read_meta
from herder.checkpoint.stored import have_same_bytes, stored_tensors
from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import catalog_name, model_config_json, near_model
from herder.errors import CheckpointError, ModelError, WeightsError
from herder.families.registry import architecture_from_hf, family_named, family_of

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MODEL, OPTIMIZER = "model", "optimizer"
"""How the names of a checkpoint's files start; those of ranks go on with their number."""
DELTA = ".delta.zip"
"""How a light checkpoint's files end: what changed since a full one's file (light.py)."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""What travels with a model besides its config and weights."""

_SAMPLING = "do_sample temperature top_p top_k min_p repetition_penalty max_new_tokens"
"""The defaults of generation_config.json that mean something here."""


@dataclass(frozen=True)
class ModelSource:
    """A model that was found: what it is, and where its weights and tokenizer lie."""

    name: str
    """How it was asked for, without the path before it."""
    family: str
    config_json: Mapping[str, Any]
    architecture: ArchitectureConfig
    """Untied where the files hold an embedding and a head that differ."""
    weights: Literal["safetensors", "gguf", "run"] | None
    """How weights are stored: hub names, GGUF names, our names, or none are there."""
    files: tuple[Path, ...] = ()
    """The files that hold the weights."""
    folder: Path | None = None
    """Where config.json and the tokenizer's files lie."""
    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends generation: of generation_config, config and tokenizer together."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """The sampling defaults of generation_config.json that are given."""
    notes: tuple[str, ...] = ()
    """What a user should be told: where the files deviate from what the config says."""


def resolve_model(
    reference: str, *, name: str | None = None, needs_weights: bool = True
) -> ModelSource:
    """The model that `reference` stands for; `name` is what to call it.

    Tried in this order: a catalog name (no weights), a .gguf file, a folder (a run directory gives
    its newest checkpoint), a hub id. needs_weights=False fetches only configs from a hub. Raises
    ModelError or one of its kin with what would do.
    """
    if not reference.strip():
        raise ModelError("the model's name is empty")
    path = Path(reference).expanduser()
    called = name or (path.name or reference).removesuffix(".gguf")
    known = catalog_name(reference)
    if known is not None and (known == reference.lower() or not path.exists()):
        return _from_config(model_config_json(known), name=name or known)
    if path.suffix == ".gguf":
        return _from_gguf(path, called)
    if path.is_dir():
        return _from_folder(path, called)
    if path.exists():
        raise ModelError(f"{reference} is a file, and no .gguf file; a model is a folder.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", reference):
        return _from_folder(hub.fetch(reference, needs_weights=needs_weights), called)
    raise ModelError(
        f"model {reference!r} is no catalog name, folder, .gguf file or hub id. "
        f"{near_model(reference)}"
    )


def _from_config(config: Mapping[str, Any], *, name: str) -> ModelSource:
    return ModelSource(
        name=name,
        family=family_of(config, name=name).name,
        config_json=config,
        architecture=architecture_from_hf(config, name=name),
        weights=None,
        eos_token_ids=tuple(_as_ids(config.get("eos_token_id"))),
    )


def _from_folder(folder: Path, name: str) -> ModelSource:
    if (folder / META).is_file() and model_pieces(folder):
        return _from_checkpoint(folder, name)
    if (folder / CHECKPOINTS).is_dir():
        passed_over = list[str]()
        newest = newest_checkpoint(
            folder, on_passed_over=lambda _path, problem: passed_over.append(problem)
        )
        if newest is None:
            raise CheckpointError(f"{folder}: this run has no checkpoint yet.")
        told = (f"{each.rstrip('.')}. It is passed over for {newest.name}." for each in passed_over)
        return replace(_from_checkpoint(newest, name), notes=tuple(told))
    config = _read_json(folder / CONFIG)
    if config is None:
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f" Name one of its files instead: {', '.join(ggufs)}." if ggufs else ""
        raise ModelError(f"{folder} has no {CONFIG}, so it is no model.{hint}")
    source = _with_generation(_from_config(config, name=name), folder)
    files = _weight_files(folder)
    if not files:
        return source
    return _untied_where_different(replace(source, weights="safetensors", files=files))


def _from_checkpoint(folder: Path, name: str) -> ModelSource:
    meta = read_meta(folder)
    config = _read_json(folder / CONFIG)
    if config is None:
        raise CheckpointError(f"{folder}: this checkpoint has no {CONFIG}.")
    source = _from_config(config, name=name)
    if differing_keys(source.architecture.model_dump(mode="json"), meta.architecture):
        raise CheckpointError(f"{folder}: {CONFIG} and {META} describe different architectures.")
    source = replace(source, weights="run", files=model_pieces(folder))
    return _with_generation(source, folder)


def model_pieces(checkpoint: Path) -> tuple[Path, ...]:
    """The files that hold the model of a checkpoint: one, or one of each rank that wrote some."""
    found = (checkpoint.glob(f"{MODEL}*{ending}") for ending in (".safetensors", DELTA))
    return tuple(sorted(chain.from_iterable(found)))


def optimizer_pieces(checkpoint: Path) -> tuple[Path, ...]:
    """The same of the optimizer's state."""
    return tuple(sorted(checkpoint.glob(f"{OPTIMIZER}*.safetensors")))


def _from_gguf(path: Path, name: str) -> ModelSource:
    file = read_gguf(path)
    source = _from_config(gguf_metadata.config_json(file), name=name)
    return replace(
        source,
        weights="gguf",
        files=(path,),
        eos_token_ids=gguf_metadata.eos_token_ids(file.metadata),
    )


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder; ModelError where it has weights of other kinds only."""
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    index = _read_json(folder / INDEX)
    if index is not None:
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise WeightsError(f"{folder / INDEX} has no weight_map.")
        if wrong := [name for name, file in shards.items() if not isinstance(file, str)]:
            raise WeightsError(f"{folder / INDEX}: weight_map names no file for {wrong[0]}.")
        return tuple(folder / name for name in sorted(set(shards.values())))
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled:
        raise ModelError(
            f"{folder} holds pickled weights only ({pickled[0]}), which can run code when read. "
            "Save the model as safetensors, for example with transformers' save_pretrained."
        )
    return ()


def _untied_where_different(source: ModelSource) -> ModelSource:
    """A config may say tied and the files hold two matrices that differ: then both are kept."""
    names = family_named(source.family).weight_rules(source.architecture).tied_hub_names()
    if names is None:
        return source
    found = stored_tensors(source.files)
    embedding, head = (found.get(name) for name in names)
    if embedding is None or head is None or have_same_bytes(embedding, head):
        return source
    note = (
        f"{source.name}: config.json says tie_word_embeddings, but {names[0]} and {names[1]} "
        "differ; the model is read as not tied, with both."
    )
    untied = source.architecture.model_copy(update={"tie_embeddings": False})
    return replace(source, architecture=untied, notes=(*source.notes, note))


def _with_generation(source: ModelSource, folder: Path) -> ModelSource:
    """With the end-of-text ids and sampling defaults that a folder gives."""
    generation = _read_json(folder / GENERATION_CONFIG) or {}
    ids = [*_as_ids(generation.get("eos_token_id")), *source.eos_token_ids, *_tokenizer_eos(folder)]
    given = {key: generation[key] for key in _SAMPLING.split() if generation.get(key) is not None}
    eos_token_ids = tuple(dict.fromkeys(ids))
    return replace(source, folder=folder, eos_token_ids=eos_token_ids, generation=given)


def _tokenizer_eos(folder: Path) -> list[int]:
    """The id of the tokenizer's eos_token, where its files give it."""
    config = _read_json(folder / "tokenizer_config.json") or {}
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return []
    decoder = config.get("added_tokens_decoder") or {}
    backend = _read_json(folder / "tokenizer.json") or {}
    try:
        ids = [int(index) for index, each in decoder.items() if each["content"] == text]
        added = backend.get("added_tokens") or []
        return ids or [each["id"] for each in added if each["content"] == text]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(f"{folder}: the tokenizer's added tokens cannot be read.") from None


def _as_ids(value: Any) -> list[int]:
    listed = value if isinstance(value, list) else [value]
    return [each for each in listed if type(each) is int]


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no file. Raises ModelError otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return value
