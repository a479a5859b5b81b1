"""Finds family files by themselves and picks the one a config.json belongs to.

Adding a published family is adding a file with a `FAMILIES` tuple: nothing here names one.
Importing this imports no torch and no transformers, for planning starts with it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

import herder.families
from herder.config.architecture import ArchitectureConfig
from herder.errors import ConfigError, ModelError, close_match
from herder.families.family import Family
from herder.families.handwritten import HANDWRITTEN

__all__ = ["Family", "architecture_from_hf", "architecture_to_hf", "families", "family_of"]


@cache
def families() -> dict[str, Family]:
    """All published families by name, found in this package's files."""
    listed = [family for family in _nearest_first("") if family is not HANDWRITTEN]
    found = {family.name: family for family in listed}
    assert len(found) == len(listed), f"two families are called alike: {[f.name for f in listed]}"
    return found


def _nearest_first(name: str) -> Iterator[Family]:
    """All families, those of the file that `name` begins with first: the others need no import."""
    modules = [module.name for module in pkgutil.iter_modules(herder.families.__path__)]
    for module in sorted(modules, key=lambda each: not name.startswith(each)):
        yield from getattr(importlib.import_module(f"herder.families.{module}"), "FAMILIES", ())
    yield HANDWRITTEN


def family_named(name: str) -> Family:
    """A family by its name. Raises ModelError with a close match."""
    for family in _nearest_first(name):
        if family.name == name:
            return family
    known = [*families(), HANDWRITTEN.name]
    raise ModelError(f"family {name!r} is not known. {close_match(name, known)}")


def family_of(config_json: Mapping[str, Any], *, name: str = "config.json") -> Family:
    """The family that claims a config.json, by its model_type and architectures.

    Raises ModelError that names what the config says when no family claims it, and when the class
    is not a plain language model of its family (a classifier, a bare trunk).
    """
    model_type = config_json.get("model_type")
    architectures = config_json.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelError(
            f"{name}: architectures={architectures!r} in config.json must be a list of class names."
        )
    if model_type is None and not architectures:
        raise ModelError(f"{name}: config.json has neither model_type nor architectures.")
    for family in _nearest_first(str(model_type)):
        if model_type not in (family.name, None):
            continue
        if not architectures or architectures[0] in family.architectures:
            return family
    claimed = [each for family in _nearest_first("") for each in family.architectures]
    given = f"architectures={architectures!r}" if architectures else "no architectures"
    sees = "It has a vision encoder. " if "vision_config" in config_json else ""
    raise ModelError(
        f"{name}: model_type={model_type!r} with {given} is not supported. {sees}"
        f"Supported: {', '.join(sorted(claimed))}."
    )


def architecture_from_hf(config_json: Mapping[str, Any], *, name: str) -> ArchitectureConfig:
    """The architecture a config.json describes; `name` is for messages.

    Strict: every key is consumed or known not to matter. Raises ConfigError that lists all
    problems, ModelError where the family is not supported or the weights are quantized.
    """
    family = family_of(config_json, name=name)
    try:
        return family.from_hf(config_json, name)
    except ValidationError as error:
        problems = [
            ".".join(map(str, each["loc"])) + " " + each["msg"].removeprefix("Value error, ")
            for each in error.errors()
        ]
        listed = "\n  ".join(map(str.strip, problems))
        raise ConfigError(f"{name}: config.json does not describe a model.\n  {listed}") from None


def architecture_to_hf(architecture: ArchitectureConfig, *, family: str) -> dict[str, Any]:
    """A config.json of that family that transformers loads and that reads back as the same record.

    Raises ModelError when the family's class cannot express the architecture.
    """
    chosen = family_named(family)
    # An absent pad_token_id is a number in some classes, which may lie past a smaller vocabulary.
    config = chosen.config_json({"pad_token_id": None, **chosen.to_hf(architecture)})
    back = chosen.from_hf(config, f"a {family} config.json")
    fields = type(back).model_fields
    lost = [each for each in fields if getattr(back, each) != getattr(architecture, each)]
    if lost:
        raise ModelError(
            f"family {family!r} cannot express this architecture: its config.json would not keep "
            f"{', '.join(lost)}."
        )
    return config
