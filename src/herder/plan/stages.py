"""What each pipeline stage holds: which layers, and how many parameters of them one rank keeps.

Owns the split of layers into stages. Embedding and head weigh on the ends, so the ends get fewer
layers where the layers do not divide evenly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention, LayerSpec
from herder.plan.parameters import Weight, embedding_weights, head_weights, layer_weights


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank before ZeRO: those of every token, and those of its experts."""

    dense: float = 0.0
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.dense + self.experts

    def plus(self, other: RankParameters, times: int = 1) -> RankParameters:
        """The sum, with `other` taken `times` times."""
        return RankParameters(
            self.dense + times * other.dense, self.experts + times * other.experts
        )


class ModelSizes:
    """An architecture's weights by kind of layer, counted once and priced for many layouts."""

    def __init__(self, architecture: ArchitectureConfig) -> None:
        self.architecture = architecture
        self.kinds = {
            layer: layer_weights(architecture, layer) for layer in set(architecture.layers)
        }
        self.first = embedding_weights(architecture)
        self.last = head_weights(architecture)
        attention = architecture.attention
        grouped = isinstance(attention, GroupedQueryAttention)
        self.num_key_value_heads = attention.num_key_value_heads if grouped else 1
        self._local: dict[tuple[LayerSpec | str, int, int], RankParameters] = {}
        self._counts: dict[int, tuple[int, ...]] = {}
        self.layer_seconds: dict[tuple[object, ...], float] = {}
        """Matrix products of one layer by what they depend on; step_time fills it."""
        self._on_ranks: dict[tuple[int, int, int, int], RankParameters] = {}
        self._distinct: dict[int, tuple[int, ...]] = {}
        self._stages: dict[int, list[Counter[LayerSpec]]] = {}

    def layers_per_stage(self, pp: int) -> tuple[int, ...]:
        """How many layers each of `pp` stages gets, first stage first."""
        if pp not in self._counts:
            self._counts[pp] = self._split(pp)
        return self._counts[pp]

    def _split(self, pp: int) -> tuple[int, ...]:
        """Gives each layer in turn to the lightest stage, ends weighing what they hold already."""
        num_layers = self.architecture.num_layers
        layer = sum(w.num_parameters for kind in self.kinds.values() for w in kind)
        layer /= len(self.kinds)
        counts, loads = [1] * pp, [1.0] * pp
        loads[0] += sum(w.num_parameters for w in self.first) / layer
        loads[-1] += sum(w.num_parameters for w in self.last) / layer
        for _ in range(num_layers - pp):
            lightest = min(range(pp), key=loads.__getitem__)
            counts[lightest] += 1
            loads[lightest] += 1
        return tuple(counts)

    def stage_layers(self, pp: int) -> list[Counter[LayerSpec]]:
        """The kinds of layers of each stage, and how many of each."""
        if pp not in self._stages:
            ends = list(accumulate(self.layers_per_stage(pp), initial=0))
            layers = self.architecture.layers
            self._stages[pp] = [Counter(layers[a:b]) for a, b in pairwise(ends)]
        return self._stages[pp]

    @cached_property
    def whole(self) -> RankParameters:
        """All parameters, on one rank."""
        return self.stage_on_rank(1, 0, tp=1, ep=1)

    def ends_on_rank(self, *, tp: int) -> float:
        """The larger of what stands before the first layer and behind the last."""
        ends = (self._on_rank("first", self.first, tp, 1), self._on_rank("last", self.last, tp, 1))
        return max(end.total for end in ends)

    def ends_of_stage(self, pp: int, stage: int, *, tp: int) -> float:
        """Parameters of the embedding and head on one rank of a stage."""
        first, last = stage == 0, stage == pp - 1
        tied = self.architecture.tie_embeddings
        weights = [*(self.first if first or (last and tied) else ()), *(self.last if last else ())]
        return sum(w.num_parameters for w in weights if w.module in ("embedding", "head")) / tp

    def layer_on_rank(self, layer: LayerSpec, *, tp: int, ep: int) -> RankParameters:
        """One layer's parameters on one rank."""
        return self._on_rank(layer, self.kinds[layer], tp, ep)

    def distinct_stages(self, pp: int) -> tuple[int, ...]:
        """Of stages that hold the same, the first: it has most micro-batches in flight."""
        if pp not in self._distinct:
            first: dict[object, int] = {}
            for stage, layers in enumerate(self.stage_layers(pp)):
                held = (frozenset(layers.items()), stage == 0, stage == pp - 1)
                first.setdefault(held, stage)
            self._distinct[pp] = tuple(first.values())
        return self._distinct[pp]

    def stage_on_rank(self, pp: int, stage: int, *, tp: int, ep: int) -> RankParameters:
        """A stage's parameters on one rank. The last stage holds a tied embedding again."""
        key = (pp, stage, tp, ep)
        if key not in self._on_ranks:
            self._on_ranks[key] = self._stage_on_rank(pp, stage, tp, ep)
        return self._on_ranks[key]

    def _stage_on_rank(self, pp: int, stage: int, tp: int, ep: int) -> RankParameters:
        total = RankParameters()
        for layer, times in self.stage_layers(pp)[stage].items():
            total = total.plus(self.layer_on_rank(layer, tp=tp, ep=ep), times)
        if stage == 0:
            total = total.plus(self._on_rank("first", self.first, tp, ep))
        if stage == pp - 1:
            total = total.plus(self._on_rank("last", self.last, tp, ep))
            if pp > 1 and self.architecture.tie_embeddings:
                total = total.plus(self._on_rank("first", self.first, tp, ep))
        return total

    def _on_rank(
        self, key: LayerSpec | str, weights: tuple[Weight, ...], tp: int, ep: int
    ) -> RankParameters:
        found = self._local.get((key, tp, ep))
        if found is None:
            sums = {True: 0.0, False: 0.0}
            for weight in weights:
                sums[weight.module == "experts"] += weight.local_parameters(
                    tp=tp, ep=ep, num_key_value_heads=self.num_key_value_heads
                )
            found = self._local[key, tp, ep] = RankParameters(sums[False], sums[True])
        return found
