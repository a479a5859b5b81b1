"""Weight-name rules as data: hub names and ours, both directions, every tensor accounted for.

Owns names only. Files, tensors and their dtypes belong to checkpoint; a rule holds for any source
whose names it lists (a safetensors folder, a GGUF file).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

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
        found: dict[str, str] = {}
        for rule in self.rules:
            every = range(self.num_layers) if rule.layers is None else rule.layers
            for layer in map(str, every if LAYER in rule.hub else (0,)):
                found[rule.hub.replace(LAYER, layer)] = rule.ours.replace(LAYER, layer)
        return found

    def to_ours(self, hub_names: Iterable[str], *, where: str) -> dict[str, str]:
        """Hub name -> our name for the tensors to load out of those present.

        Total: raises WeightsError that lists every missing and every unknown name. A tied model
        with both matrices loads the embedding (that they are equal is the caller's check), and
        one with only the head fills the embedding from it.
        """
        ignorable = "|".join(
            re.escape(each).replace(re.escape(LAYER), r"\d+") for each in self.ignorable
        )
        present = {name for name in hub_names if not re.fullmatch(ignorable, name)}
        wanted = self.pairs()
        unknown = present - wanted.keys()
        if (names := self.tied_hub_names()) is not None:
            embedding, head = names
            unused = embedding if head in present and embedding not in present else head
            del wanted[unused]
            wanted[head if unused == embedding else embedding] = EMBEDDING
        _refuse_mismatch(where, missing=wanted.keys() - present, unknown=unknown)
        return wanted

    def to_hub(self, our_names: Iterable[str], *, where: str) -> dict[str, str]:
        """Our name -> hub name, total in the same way; a tied head is not written."""
        wanted = {ours: hub for hub, ours in self.pairs().items()}
        if self.tied:
            wanted.pop(HEAD, None)
        present = set(our_names)
        _refuse_mismatch(where, missing=wanted.keys() - present, unknown=present - wanted.keys())
        return wanted

    def of_ours(self) -> WeightRules:
        """Rules of files that already use our names: checkpoints of runs."""
        rules = tuple(replace(rule, hub=rule.ours) for rule in self.rules)
        return replace(self, rules=rules, ignorable=())

    def tied_hub_names(self) -> tuple[str, str] | None:
        """The hub names of embedding and head, where the architecture ties them."""
        hub_of = {ours: hub for hub, ours in self.pairs().items()}
        return (hub_of[EMBEDDING], hub_of[HEAD]) if self.tied else None


def _refuse_mismatch(where: str, *, missing: Set[str], unknown: Set[str]) -> None:
    kinds = {"missing": missing, "that the architecture does not have": unknown}
    parts = [
        f"{len(names)} {kind}: {listed(sorted(names))}" for kind, names in kinds.items() if names
    ]
    if parts:
        raise WeightsError(
            f"{where}: tensors do not match the architecture.\n  "
            + "\n  ".join(parts)
            + "\nThe weights belong to another config.json, or files of this model are missing."
        )


def listed(names: Sequence[str], *, separator: str = ", ") -> str:
    """The first dozen, and how many more there are."""
    rest = len(names) - _MOST_LISTED
    return separator.join([*names[:_MOST_LISTED], *([f"and {rest} more"] if rest > 0 else [])])
