"""The exception tree: every error a user can meet derives from HerderError and is one message.

    HerderError
    ├── UserError            exit 2: what was asked for cannot be done as asked
    │   ├── ConfigError      a key, type or value in a config, recipe, override or flag
    │   ├── PlanError        no legal layout, or it does not fit
    │   ├── ModelError       a model that is unknown, unsupported, or whose files are wrong
    │   │   └── WeightsError missing, extra, misshapen or damaged tensors
    │   ├── DataError        a corpus, tokenizer or template
    │   ├── CheckpointError  a run directory or checkpoint that cannot be written, read or used
    │   ├── RequestError     one generation request
    │   └── ResourceError    a port, disk, device or optional package
    │       ├── OverloadedError   the queue of requests is full: try again later
    │       └── UnavailableError  the server is loading, draining or gone
    ├── TrainingError        exit 1: a run cannot go on: its loss is not finite, for example
    │   └── RankError        one rank of a job died, hung or raised an error
    └── CheckFailedError     exit 1: a comparison that was asked for did not hold

A message says where, what was given, which rule it breaks with the numbers, and what would do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HerderError(Exception):
    """Base of all errors that are shown as a message without a traceback."""

    exit_status = 1


class UserError(HerderError):
    """What was asked for cannot be done as asked."""

    exit_status = 2


class ConfigError(UserError):
    """A key, type or value in a config, recipe, override or flag is wrong."""


class PlanError(UserError):
    """No legal layout exists, or the model does not fit."""


class ModelError(UserError):
    """A model is unknown or unsupported, or its files are wrong."""


class WeightsError(ModelError):
    """Tensors are missing, extra, misshapen or damaged."""


class DataError(UserError):
    """A corpus, tokenizer or chat template cannot be used."""


class CheckpointError(UserError):
    """A run directory or checkpoint cannot be written, read or used."""


class RequestError(UserError):
    """One generation request is refused; `parameter` names its field where one is at fault."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class ResourceError(UserError):
    """A port, disk, device or optional package is not there or not free."""


class OverloadedError(ResourceError):
    """The queue of requests is full; the same request may be accepted later."""


class UnavailableError(ResourceError):
    """The server is loading, draining or gone."""


class TrainingError(HerderError):
    """A run cannot go on, though nothing it was given is wrong in itself."""

    exit_status = 1


class RankError(TrainingError):
    """One rank of a job died, hung or raised an error, and the others were ended."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank


class CheckFailedError(HerderError):
    """A comparison that was asked for did not hold."""

    exit_status = 1


def close_match(given: str, known: Iterable[str]) -> str:
    """A sentence that suggests the nearest known name, or lists all of them when they are few."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known: {', '.join(names)}." if len(names) <= 16 else f"{len(names)} names are known."
