"""What each pipeline stage holds: which layers, and how many parameters of them one rank keeps.

Owns the split of layers into stages. Embedding and head weigh on the ends, so the ends get fewer
layers where the layers do not divide evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention, LayerSpec
from herder.plan.parameters import (
    Module,
    Weight,
    embedding_weights,
    head_weights,
    layer_weights,
)


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank before ZeRO: those of every token, and those of its experts."""

    dense: float = 0.0
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.dense + self.experts


class ModelSizes:
    """An architecture's weights by kind of layer, counted once and priced for many layouts."""

    def __init__(self, architecture: ArchitectureConfig) -> None:
        self.architecture = architecture
        self.kinds = {
            kind: Counter(layer_weights(architecture, kind)) for kind in set(architecture.layers)
        }
        """The weights of each kind of layer, equal ones counted."""
        self.first = embedding_weights(architecture)
        self.last = head_weights(architecture)
        attention = architecture.attention
        grouped = isinstance(attention, GroupedQueryAttention)
        self.num_key_value_heads = attention.num_key_value_heads if grouped else 1
        self.layers_per_stage = cache(self._layers_per_stage)
        self.stage_layers = cache(self._stage_layers)
        self.distinct_stages = cache(self._distinct_stages)
        self.stage_on_rank = cache(self._stage_on_rank)
        self.largest_layer_on_rank = cache(self._largest_layer_on_rank)
        self.largest_end_on_rank = cache(self._largest_end_on_rank)
        self.whole = self.stage_on_rank(1, 0, tp=1, ep=1)
        """All parameters, on one rank."""

    def _layers_per_stage(self, pp: int) -> tuple[int, ...]:
        """How many layers each of `pp` stages gets, first stage first.

        Each layer in turn goes to the lightest stage, the ends weighing what they hold already.
        """
        layer = sum(w.num_parameters * n for kind in self.kinds.values() for w, n in kind.items())
        layer /= len(self.kinds)
        counts, loads = [1] * pp, [1.0] * pp
        loads[0] += sum(w.num_parameters for w in self.first) / layer
        loads[-1] += sum(w.num_parameters for w in self.last) / layer
        for _ in range(self.architecture.num_layers - pp):
            lightest = min(range(pp), key=loads.__getitem__)
            counts[lightest] += 1
            loads[lightest] += 1
        return tuple(counts)

    def _stage_layers(self, pp: int) -> list[Counter[LayerSpec]]:
        """The kinds of layers of each stage, and how many of each."""
        ends = accumulate(self.layers_per_stage(pp), initial=0)
        return [Counter(self.architecture.layers[a:b]) for a, b in pairwise(ends)]

    def _distinct_stages(self, pp: int) -> tuple[int, ...]:
        """Of stages that hold the same, the first: it has most micro-batches in flight."""
        first: dict[object, int] = {}
        for stage, layers in enumerate(self.stage_layers(pp)):
            first.setdefault((frozenset(layers.items()), stage == 0, stage == pp - 1), stage)
        return tuple(first.values())

    def _stage_on_rank(self, pp: int, stage: int, *, tp: int, ep: int) -> RankParameters:
        """A stage's parameters on one rank."""
        return self._on_rank(self._stage_weights(pp, stage), tp=tp, ep=ep)

    def _stage_weights(self, pp: int, stage: int) -> Iterator[tuple[Weight, int]]:
        """A stage's weights, each with how often it is there."""
        for kind, times in self.stage_layers(pp)[stage].items():
            yield from ((weight, times * n) for weight, n in self.kinds[kind].items())
        yield from ((weight, 1) for weight in self._ends(pp, stage))

    def bytes_on_rank(
        self, pp: int, stage: int, *, tp: int, ep: int, of: Callable[[Weight], float]
    ) -> float:
        """Bytes of a stage's weights on one rank, `of` telling those of a parameter."""
        heads = self.num_key_value_heads
        return sum(
            times * of(weight) * weight.local_parameters(tp=tp, ep=ep, num_key_value_heads=heads)
            for weight, times in self._stage_weights(pp, stage)
        )

    def bytes_by_module(self, of: Callable[[Weight], float]) -> dict[Module, float]:
        """Bytes of all weights, `of` telling those of a parameter."""
        sums: dict[Module, float] = {}
        for weight, times in self._stage_weights(1, 0):
            added = times * weight.num_parameters * of(weight)
            sums[weight.module] = sums.get(weight.module, 0.0) + added
        return sums

    def _ends(self, pp: int, stage: int) -> Iterator[Weight]:
        """What a stage holds beside layers. The last one holds a tied embedding again."""
        is_last = stage == pp - 1
        if stage == 0 or (is_last and self.architecture.tie_embeddings):
            yield from self.first
        if is_last:
            yield from self.last

    def ends_of_stage(self, pp: int, stage: int, *, tp: int) -> float:
        """Parameters of the embedding and head on one rank of a stage."""
        ends = self._ends(pp, stage)
        return sum(w.num_parameters for w in ends if w.module in ("embedding", "head")) / tp

    def _largest_end_on_rank(self, *, tp: int) -> float:
        """The larger of what stands before the first layer and behind the last."""
        ends = (((w, 1) for w in weights) for weights in (self.first, self.last))
        return max(self._on_rank(end, tp=tp, ep=1).total for end in ends)

    def _largest_layer_on_rank(self, *, tp: int, ep: int) -> float:
        """Parameters of the largest kind of layer on one rank."""
        kinds = self.kinds.values()
        return max(self._on_rank(kind.items(), tp=tp, ep=ep).total for kind in kinds)

    def _on_rank(
        self, weights: Iterable[tuple[Weight, int]], *, tp: int, ep: int
    ) -> RankParameters:
        """The sum over weights, each with how often it is there."""
        sums = {True: 0.0, False: 0.0}
        heads = self.num_key_value_heads
        for weight, times in weights:
            local = weight.local_parameters(tp=tp, ep=ep, num_key_value_heads=heads)
            sums[weight.module == "experts"] += times * local
        return RankParameters(sums[False], sums[True])
