"""What `herder train` is asked for: a recipe or a run to go on with, its model, its tokenizer."""

from __future__ import annotations

from pathlib import Path

from herder.checkpoint.source import ModelSource
from herder.cli import models
from herder.config.load import load_run_config
from herder.config.run import RunConfig
from herder.errors import ConfigError
from herder.train.prepare import saved_config
from herder.train.source import find_model


def asked_config(
    recipe: Path | None, resume: Path | None, overrides: tuple[str, ...]
) -> tuple[RunConfig, list[str]]:
    """(the config, the words that ask for it). Raises ConfigError unless exactly one is given."""
    if recipe is not None and resume is not None:
        raise ConfigError(
            f"RECIPE {recipe} and --resume {resume}: give one of them. --resume goes on by the "
            "config that its run saved; --set replaces values of either."
        )
    words = [word for each in overrides for word in ("--set", each)]
    if resume is not None:
        return saved_config(resume, overrides), ["--resume", str(resume), *words]
    if recipe is None:
        raise ConfigError(
            "Nothing to train: give a RECIPE, for example recipes/debug.yaml, or --resume RUN."
        )
    return load_run_config(recipe, overrides), [str(recipe), *words]


def model_and_tokenizer(config: RunConfig) -> tuple[ModelSource, Path]:
    """The model of a recipe, and where its tokenizer lies.

    Weights are fetched only where they, or a tokenizer packed with them, are needed.
    """

    def resolve(reference: str) -> ModelSource:
        packed = reference.lower() in models.PACKAGED and config.data.tokenizer is None
        needs_weights = packed or config.model.initialize == "pretrained"
        return models.resolve(reference, needs_weights=needs_weights)

    source = find_model(config.model, resolve)
    if config.data.tokenizer is None:
        return source, models.tokenizer_folder(source)
    return source, models.recipe_tokenizer(config)
