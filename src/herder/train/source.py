"""Which model a recipe trains, and the files that make its checkpoints loadable as models.

Owns what a recipe may do to a source: replace keys, leave its weights out, borrow a tokenizer. How
names are resolved is given to it. Imports no torch: the plan is shown before anything heavy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from herder.checkpoint.source import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, ModelSource
from herder.config.load import override_architecture
from herder.config.run import ModelConfig
from herder.errors import ConfigError, DataError, close_match
from herder.families.registry import architecture_from_hf, architecture_to_hf, family_of


def find_model(
    model: ModelConfig, resolve: Callable[[str], ModelSource], *, needs_weights: bool = True
) -> ModelSource:
    """The model of a recipe: its source or its own config.json, with what the recipe replaces.

    needs_weights=False is for planning, which does without. Raises ConfigError when weights are
    asked for that are not there.
    """
    source = _origin(model, resolve)
    if model.architecture:
        changed = override_architecture(
            source.architecture, model.architecture, where="model.architecture"
        )
        source = replace(source, architecture=changed)
    if needs_weights and model.initialize == "pretrained" and source.weights is None:
        raise ConfigError(
            f"model.source: {source.name} has a config but no weights here. Give a folder or hub "
            "id that has, or --set model.initialize=random."
        )
    return source


def _origin(model: ModelConfig, resolve: Callable[[str], ModelSource]) -> ModelSource:
    if model.source is None:
        assert model.config is not None, "ModelConfig requires one of source and config"
        return _from_config(model.config)
    source = resolve(model.source)
    return _overridden(source, model.override) if model.override else source


def model_files(source: ModelSource, tokenizer: Path) -> dict[str, bytes]:
    """What lies beside the weights of a checkpoint, by name: config, generation config, tokenizer.

    tokenizer: a folder or a tokenizer.json. Raises DataError when it cannot be read.
    """
    config = architecture_to_hf(source.architecture, family=source.family)
    ends = {"eos_token_id": list(source.eos_token_ids)} if source.eos_token_ids else {}
    files = {CONFIG: _json({**config, **ends})}
    if ends or source.generation:
        files[GENERATION_CONFIG] = _json({**source.generation, **ends})
    if not tokenizer.is_dir():
        candidates = {TOKENIZER_FILES[0]: tokenizer}
    else:
        candidates = {name: tokenizer / name for name in TOKENIZER_FILES}
    try:
        found = {name: path.read_bytes() for name, path in candidates.items() if path.is_file()}
    except OSError as error:
        raise DataError(f"{tokenizer}: the tokenizer cannot be read: {error}.") from error
    return {**files, **found}


def _from_config(config: Mapping[str, Any]) -> ModelSource:
    family = family_of(config, name="model.config").name
    ends = config.get("eos_token_id")
    return ModelSource(
        name=f"{family} from model.config",
        family=family,
        config_json=config,
        architecture=architecture_from_hf(config, name="model.config"),
        weights=None,
        eos_token_ids=tuple(ends if isinstance(ends, list) else [] if ends is None else [ends]),
    )


def _overridden(source: ModelSource, override: Mapping[str, Any]) -> ModelSource:
    unknown = sorted(override.keys() - source.config_json.keys())
    if unknown:
        raise ConfigError(
            f"model.override: {unknown[0]!r} is not in the config.json of {source.name}. "
            f"{close_match(unknown[0], source.config_json)}"
        )
    config = {**source.config_json, **override}
    architecture = architecture_from_hf(config, name=f"{source.name} with model.override")
    return replace(source, config_json=config, architecture=architecture)


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
