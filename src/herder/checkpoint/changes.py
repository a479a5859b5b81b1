"""What a run goes on with that it was not made with, and what each difference does to its results.

Owns the wording of what is allowed; what is refused is told where it is. Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from herder.checkpoint.metadata import ExperimentMeta, differing_keys
from herder.plan.layout import Layout

_NOTHING = "changes no results"
_ROUNDING = "rounding may differ: losses not bit for bit those of an unbroken run"
_SUMS = "the same batches in the same order, sums in another order: losses differ by rounding"
_CODE = "what a step computes may have changed, as git diff between them tells"
_TOKENS = "the same texts may become other tokens, if they are tokenized anew"
_SCHEDULE = (
    "the learning rate follows the new length, which a run of that length did from its start"
)

_OF_PACKAGES = {
    "herder": _CODE,
    "tokenizers": _TOKENS,
    **dict.fromkeys(("python", "numpy", "safetensors"), _NOTHING),
}
"""Of the others, which compute, another version rounds otherwise."""
_THAT_COMPUTES = {"cpu": ("cpu", "num_cores"), "gpu": ("gpus", "driver")}
_OF_CONFIG = {
    "train.steps": _SCHEDULE,
    **dict.fromkeys(("train.compile", "train.recompute", "train.loss_chunk_tokens"), _ROUNDING),
}
_TOLD_BY_PLAN = ("cluster", "layout")


def explain_changes(saved: ExperimentMeta, now: ExperimentMeta) -> list[str]:
    """A line for each effect, as `torch 2.11.0 -> 2.13.0: rounding may differ`; none without any.

    What an older version did not write down is not compared.
    """
    by_effect = defaultdict[str, list[str]](list)
    for what, old, new, effect in _differences(saved, now):
        by_effect[effect].append(f"{what} {old} -> {new}".lstrip())
    return [f"{', '.join(changes)}: {effect}" for effect, changes in by_effect.items()]


def _differences(
    saved: ExperimentMeta, now: ExperimentMeta
) -> Iterator[tuple[str, object, object, str]]:
    """(what, old, new, effect) of each."""
    old_commit, new_commit = _short(saved.git_commit), _short(now.git_commit)
    if old_commit != new_commit:
        yield "herder commit", old_commit, new_commit, _CODE
    for name in sorted(saved.versions.keys() & now.versions.keys()):
        old, new = saved.versions[name], now.versions[name]
        if old != new:
            yield name, old, new, _OF_PACKAGES.get(name, _ROUNDING)
    yield from _of_devices(saved, now)
    for path, (old, new) in differing_keys(saved.config, now.config).items():
        if path.split(".")[0] not in _TOLD_BY_PLAN:
            yield path, repr(old), repr(new), _OF_CONFIG.get(path, _NOTHING)


def _of_devices(
    saved: ExperimentMeta, now: ExperimentMeta
) -> Iterator[tuple[str, object, object, str]]:
    (old, old_layout, _), (new, new_layout, kind) = _devices(saved), _devices(now)
    if old and old_layout != new_layout:
        yield "", f"{old} ({old_layout})", f"{new} ({new_layout})", _SUMS
    elif old and old != new:
        yield "", old, new, _ROUNDING
    formats: list[Any] = [meta.plan.get("precision", {}) for meta in (saved, now)]
    for name, (before, after) in differing_keys(*formats).items():
        if None not in (before, after):
            yield f"precision of {name}", before, after, _ROUNDING
    for name in ("cpu", "num_cores", "memory_gb", "gpus", "driver"):
        before, after = _hardware(saved, name), _hardware(now, name)
        if before != after and None not in (before, after):
            yield name, before, after, _ROUNDING if name in _THAT_COMPUTES[kind] else _NOTHING


def _devices(meta: ExperimentMeta) -> tuple[str, str, str]:
    """(`4 x h100-80gb`, the layout, gpu or cpu) of a plan; empty where it cannot be read."""
    plan: dict[str, Any] = meta.plan
    try:
        layout, gpu = Layout.model_validate(plan["layout"]), plan["cluster"]["gpu"]
        return f"{layout.num_ranks} x {gpu['name']}", layout.told(), gpu["kind"]
    except (KeyError, TypeError, ValidationError):
        return "", "", "cpu"


def _hardware(meta: ExperimentMeta, name: str) -> object:
    """One figure; of GPUs their kinds, since how many compute is the plan's."""
    value = meta.hardware.get(name)
    return ", ".join(sorted(set(map(str, value)))) or "none" if isinstance(value, list) else value


def _short(commit: str | None) -> str:
    """Its first digits, and what changed in files."""
    name, plus, changes = (commit or "unknown").partition("+")
    return f"{name[:10]}{plus}{changes}"
