"""Published models and devices by name, read from the files that ship with this package.

Owns the names and where the files lie; what a config.json means is the families' knowledge.
"""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from herder.config.machine import cpu_share
from herder.config.run import ClusterConfig, GpuConfig
from herder.errors import ConfigError, ModelError, close_match

_FOLDER = Path(__file__).parent
PUBLISHED = _FOLDER / "published"
DEBUG = _FOLDER / "debug"
"""Tiny models, one for each way in which models differ; nobody's weights."""


def model_names() -> tuple[str, ...]:
    """The catalog's published models, sorted: the last part of the hub id in lower case."""
    return tuple(sorted(path.stem for path in PUBLISHED.glob("*.json")))


def debug_model_names() -> tuple[str, ...]:
    """The catalog's own tiny models, sorted."""
    return tuple(sorted(path.stem for path in DEBUG.glob("*.json")))


def catalog_name(reference: str) -> str | None:
    """The catalog model that a name means: one that is called so, or the published one that goes on
    from it (mixtral-8x7b: mixtral-8x7b-v0.1). None where several do, unless all go on from one.
    """
    name, known = reference.lower(), model_names()
    if name in debug_model_names():
        return name
    longer = [each for each in known if f"{each}-".startswith(f"{name}-")]
    shortest = min(longer, key=len, default=None)
    goes_on = [each for each in longer if f"{each}-".startswith(f"{shortest}-")]
    return shortest if goes_on == longer else None


def model_config_json(name: str) -> dict[str, Any]:
    """The config.json of a catalog model; a fresh dict on each call.

    Raises ModelError with a close match when the name is unknown.
    """
    folder = DEBUG if name.lower() in debug_model_names() else PUBLISHED
    path = folder / f"{name.lower()}.json"
    if path.parent != folder or not path.is_file():
        raise ModelError(f"model {name!r} is not in the catalog. {near_model(name)}")
    return json.loads(path.read_text(encoding="utf-8"))


def near_model(name: str) -> str:
    """A sentence that suggests a catalog model."""
    return close_match(name.lower(), (*model_names(), *debug_model_names()))


@cache
def _gpu_entries() -> dict[str, GpuConfig]:
    entries = tomllib.loads((_FOLDER / "gpus.toml").read_text(encoding="utf-8"))
    return {name: GpuConfig(name=name, **figures) for name, figures in entries.items()}


def gpu_names() -> tuple[str, ...]:
    """The catalog's devices in the file's order, `cpu` last."""
    return tuple(_gpu_entries())


def gpu(name: str) -> GpuConfig:
    """A device's published figures; of `cpu`, those of a machine with two cores.

    Raises ConfigError with a close match when it is unknown.
    """
    entry = _gpu_entries().get(name.lower())
    if entry is None:
        raise ConfigError(f"gpu {name!r} is not in the catalog. {near_gpu(name)}")
    return entry


def near_gpu(name: str) -> str:
    """A sentence that suggests a device: one whose name begins like this, or is like it."""
    longer = [known for known in gpu_names() if known.startswith(name.lower()) and name]
    return f"Did you mean {longer[0]!r}?" if longer else close_match(name.lower(), gpu_names())


def cluster_gpu(cluster: ClusterConfig) -> GpuConfig:
    """The cluster's device: its own figures, or those of the catalog name it gives.

    By the name `cpu`, a node is a machine like this one, and its ranks share it evenly.
    """
    if not isinstance(cluster.gpu, str):
        return cluster.gpu
    device = gpu(cluster.gpu)
    return cpu_share(cluster.gpus_per_node) if device.kind == "cpu" else device
