"""What a family is: the configs it claims, how they are read and written, how weights are named.

Knows no family and no tensor. Each family file lists its `FAMILIES`; the registry finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from herder.config.architecture import ArchitectureConfig
from herder.families.reading import ConfigReader
from herder.families.weights import WeightRules


@dataclass(frozen=True)
class Family:
    """One model family, as functions and names.

    `from_hf` and `to_hf` are inverses on everything the family can express.
    """

    name: str
    """The model_type of its config.json."""
    architectures: tuple[str, ...]
    """Class names under `architectures` that mean this decoder with a language-model head."""
    read: Callable[[ConfigReader], ArchitectureConfig]
    """The architecture of a config.json. Calls `finish` of its reader."""
    to_hf: Callable[[ArchitectureConfig], dict[str, Any]]
    """Keys of a config.json; what the family cannot express is left out, the registry notices."""
    weight_rules: Callable[[ArchitectureConfig], WeightRules]
    tiny: Mapping[str, Any]
    """Keys of a model small enough to build in a test, its sizes all unequal."""

    def from_hf(self, config: Mapping[str, Any], where: str) -> ArchitectureConfig:
        """The architecture of a config.json. Raises ConfigError with all problems together."""
        return self.read(ConfigReader(config, where=where))

    def config_json(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json of this family with these keys."""
        return {"architectures": [self.architectures[0]], "model_type": self.name, **keys}

    def tiny_config(self) -> dict[str, Any]:
        """The config.json of the tiny model."""
        return self.config_json(self.tiny)
