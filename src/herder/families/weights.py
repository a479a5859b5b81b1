"""Weight-name rules as data: hub names and ours, both directions, every tensor accounted for.

Owns names and which part of a tensor is which, no tensor. Files and dtypes belong to checkpoint; a
rule holds for any source whose names it lists (a safetensors folder, a GGUF file).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from herder.errors import WeightsError

LAYER = "{layer}"
EXPERT = "{expert}"
EMBEDDING = "embed.weight"
HEAD = "head.weight"
_MOST_LISTED = 12


@dataclass(frozen=True)
class WeightRule:
    """One line of the table: a tensor of ours and the hub tensor, or part of one, that holds it.

    `{layer}` in both templates stands for each layer's index; `{expert}` in the hub's for each row
    of ours, which stacks the experts. With both filled a rule is about one tensor.
    """

    hub: str
    ours: str
    layers: tuple[int, ...] | None = None
    """Which layers have it; None: all of them."""
    outputs: slice | None = None
    """Which of the hub tensor's outputs are ours, where it fuses several of our tensors."""
    transposed: bool = False
    """Whether the hub has inputs before outputs."""
    expert: int | None = None
    """Which row of ours this is, once `{expert}` is filled."""

    @property
    def is_whole(self) -> bool:
        """Whether the two tensors are the same."""
        return self.expert is None and self.outputs is None and not self.transposed

    @property
    def output_dim(self) -> int:
        """The dim of our tensor that counts outputs, from the end."""
        return -1 if self.ours.endswith(".bias") else -2

    def part_of(self, hub_tensor: Any) -> Any:
        """The view of a hub tensor (anything that transposes and slices as torch's) that is ours.

        Of a rule about one expert it is that expert's row of ours.
        """
        view = hub_tensor.transpose(-1, -2) if self.transposed else hub_tensor
        if self.outputs is None:
            return view
        return view[(..., self.outputs, *[slice(None)] * (-1 - self.output_dim))]


def hub_shape(
    parts: Sequence[WeightRule], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """The shape of the hub tensor that holds these parts, from the shapes of our tensors."""
    first = parts[0]
    shape = list(shapes[first.ours])[0 if first.expert is None else 1 :]
    if first.outputs is not None:
        shape[first.output_dim] = sum(shapes[each.ours][each.output_dim] for each in parts)
    if first.transposed:
        shape[-2:] = shape[:-3:-1]
    return tuple(shape)


@dataclass(frozen=True)
class WeightRules:
    """All tensors of one architecture, by name."""

    rules: tuple[WeightRule, ...]
    num_layers: int
    tied: bool
    """Whether the head is the embedding: a hub file may hold either of the two, or both."""
    num_experts: int = 0
    ignorable: tuple[str, ...] = ()
    """Hub names that hold nothing the forward pass reads, as templates: `{layer}` stands for any
    number, a final `{rest}` for anything."""

    def by_hub_name(self) -> dict[str, tuple[WeightRule, ...]]:
        """Every hub tensor of the model with the parts it holds; the head too when it is tied."""
        found: dict[str, tuple[WeightRule, ...]] = {}
        for rule in self.rules:
            every = range(self.num_layers) if rule.layers is None else rule.layers
            for layer in map(str, every if LAYER in rule.hub else (0,)):
                hub, ours = rule.hub.replace(LAYER, layer), rule.ours.replace(LAYER, layer)
                for expert in range(self.num_experts) if EXPERT in hub else (None,):
                    name = hub.replace(EXPERT, str(expert))
                    part = WeightRule(name, ours, None, rule.outputs, rule.transposed, expert)
                    found[name] = (*found.get(name, ()), part)
        return found

    def to_ours(self, hub_names: Iterable[str], *, where: str) -> dict[str, tuple[WeightRule, ...]]:
        """Of the hub tensors present, those to load, each with the parts of ours that it holds.

        Total: raises WeightsError that lists every missing and every unknown name. A tied model
        with both matrices loads the embedding (that they are equal is the caller's check), and
        one with only the head fills the embedding from it.
        """
        ignorable = "|".join(
            re.escape(each).replace(r"\{layer\}", r"\d+").replace(r"\{rest\}", ".+")
            for each in self.ignorable
        )
        present = {name for name in hub_names if not re.fullmatch(ignorable, name)}
        wanted = self.by_hub_name()
        unknown = present - wanted.keys()
        if (names := self.tied_hub_names()) is not None:
            embedding, head = names
            used = head if head in present and embedding not in present else embedding
            del wanted[embedding], wanted[head]
            wanted[used] = (WeightRule(used, EMBEDDING),)
        _refuse_mismatch(where, missing=wanted.keys() - present, unknown=unknown)
        return wanted

    def to_hub(self, our_names: Iterable[str], *, where: str) -> dict[str, tuple[WeightRule, ...]]:
        """The hub tensors to write, total in the same way; a tied head is not written."""
        wanted = self.by_hub_name()
        present = set(our_names)
        if self.tied:
            wanted = {hub: parts for hub, parts in wanted.items() if parts[0].ours != HEAD}
            present.discard(HEAD)
        named = {part.ours for parts in wanted.values() for part in parts}
        _refuse_mismatch(where, missing=named - present, unknown=present - named)
        return wanted

    def tied_hub_names(self) -> tuple[str, str] | None:
        """The hub names of embedding and head, where the architecture ties them."""
        hub_of = {rule.ours: rule.hub for rule in self.rules}
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
