"""Weight-name rules as data: hub names and ours, both directions, every tensor accounted for.

Owns names only. Files, tensors and their dtypes belong to checkpoint; a rule holds for any source
whose names it lists (a safetensors folder, a GGUF file).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from herder.errors import WeightsError

LAYER = "{layer}"
EMBEDDING = "embed.weight"
HEAD = "head.weight"
_MOST_LISTED = 12


@dataclass(frozen=True)
class WeightRule:
    """One line of the table. `{layer}` in both templates stands for each layer's index."""

    hub: str
    ours: str
    layers: tuple[int, ...] | None = None
    """Which layers have it; None: all of them."""


@dataclass(frozen=True)
class WeightRules:
    """All tensors of one architecture, by name."""

    rules: tuple[WeightRule, ...]
    num_layers: int
    tied: bool
    """Whether the head is the embedding: a hub file may hold either of the two, or both."""
    ignorable: tuple[str, ...] = ()
    """Hub names, as templates, that hold nothing the forward pass reads."""

    def pairs(self) -> dict[str, str]:
        """Hub name -> our name for every tensor of the model; the head too when it is tied."""
        return dict(self._pairs())

    def _pairs(self) -> Iterator[tuple[str, str]]:
        for rule in self.rules:
            if LAYER not in rule.hub:
                yield rule.hub, rule.ours
                continue
            for layer in range(self.num_layers) if rule.layers is None else rule.layers:
                yield rule.hub.replace(LAYER, str(layer)), rule.ours.replace(LAYER, str(layer))

    def our_names(self) -> set[str]:
        """Every parameter the model has; a tied head is the embedding and is not listed."""
        return {ours for ours in self.pairs().values() if not (self.tied and ours == HEAD)}

    def to_ours(self, hub_names: Iterable[str], *, where: str) -> dict[str, str]:
        """Hub name -> our name for the tensors to load out of those present.

        Total: raises WeightsError that lists every missing and every unknown name. A tied model
        with both matrices loads the embedding (that they are equal is the caller's check), and
        one with only the head fills the embedding from it.
        """
        present = {name for name in hub_names if not self._is_ignorable(name)}
        wanted = self.pairs()
        unknown = present - wanted.keys()
        if self.tied:
            wanted = self._one_of_tied(wanted, present)
        missing = wanted.keys() - present
        if missing or unknown:
            raise WeightsError(_mismatch(where, sorted(missing), sorted(unknown)))
        return {hub: ours for hub, ours in wanted.items() if hub in present}

    def to_hub(self, our_names: Iterable[str], *, where: str) -> dict[str, str]:
        """Our name -> hub name, total in the same way; a tied head is not written."""
        wanted = {ours: hub for hub, ours in self.pairs().items()}
        if self.tied:
            wanted.pop(HEAD, None)
        present = set(our_names)
        missing, unknown = wanted.keys() - present, present - wanted.keys()
        if missing or unknown:
            raise WeightsError(_mismatch(where, sorted(missing), sorted(unknown)))
        return wanted

    def tied_hub_names(self) -> tuple[str, str] | None:
        """The hub names of embedding and head, where the architecture ties them."""
        hub_of = {ours: hub for hub, ours in self.pairs().items()}
        return (hub_of[EMBEDDING], hub_of[HEAD]) if self.tied else None

    def _one_of_tied(self, wanted: dict[str, str], present: set[str]) -> dict[str, str]:
        hub_of = {ours: hub for hub, ours in wanted.items()}
        embedding, head = hub_of[EMBEDDING], hub_of[HEAD]
        rest = {hub: ours for hub, ours in wanted.items() if hub not in (embedding, head)}
        source = head if head in present and embedding not in present else embedding
        return {source: EMBEDDING, **rest}

    def _is_ignorable(self, name: str) -> bool:
        return any(_matches(template, name) for template in self.ignorable)


def _matches(template: str, name: str) -> bool:
    pattern = re.escape(template).replace(re.escape(LAYER), r"\d+")
    return re.fullmatch(pattern, name) is not None


def _mismatch(where: str, missing: list[str], unknown: list[str]) -> str:
    parts = [
        f"{len(names)} {kind}: {_listed(names)}"
        for kind, names in (("missing", missing), ("that the architecture does not have", unknown))
        if names
    ]
    return (
        f"{where}: tensors do not match the architecture.\n  "
        + "\n  ".join(parts)
        + "\nThe weights belong to another config.json, or files of this model are missing."
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_LISTED])
    rest = len(names) - _MOST_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown
