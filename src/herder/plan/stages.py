"""What each pipeline stage holds: which layers, and how many parameters of them one rank keeps.

Owns the split of layers into stages, by what they cost: a layer and the head by the parameters that
a token is multiplied with, the embedding, which costs no time, by the memory that it takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention, LayerSpec
from herder.plan.allocated import HeldWeights, held_weights
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
        self.held_on_rank = cache(self._held_on_rank)
        self.largest_layer_on_rank = cache(self._largest_layer_on_rank)
        self.largest_end_on_rank = cache(self._largest_end_on_rank)
        self.whole = self.stage_on_rank(1, 0, tp=1, ep=1)
        """All parameters, on one rank."""

    def _layers_per_stage(self, num_stages: int) -> tuple[int, ...]:
        """How many layers each stage gets, first stage first: the costliest as cheap as it can be,
        the others about equal."""
        architecture = self.architecture
        costs = {kind: _cost(architecture, weights) for kind, weights in self.kinds.items()}
        sizes = {kind: _size(weights) for kind, weights in self.kinds.items()}
        layers, num_layers = architecture.layers, architecture.num_layers
        cost_of_size = sum(costs[x] for x in layers) / sum(sizes[x] for x in layers)
        embedding = _size(Counter(self.first)) * cost_of_size
        head = float(architecture.vocab_size * architecture.hidden_size)
        loads = [costs[layer] for layer in layers]
        loads[0] += embedding
        loads[num_layers - 1] += head
        return even_parts(loads, num_stages)

    def _stage_layers(self, pp: int, chunks: int = 1) -> list[Counter[LayerSpec]]:
        """The kinds of layers on each pipeline rank, and how many of each.

        chunks: stages a rank, `pp` apart.
        """
        ends = accumulate(self.layers_per_stage(pp * chunks), initial=0)
        stages = [Counter(self.architecture.layers[a:b]) for a, b in pairwise(ends)]
        return [sum(stages[rank::pp], start=Counter()) for rank in range(pp)]

    def _distinct_stages(self, pp: int, chunks: int = 1) -> tuple[int, ...]:
        """Of ranks that hold the same, the first: it has most micro-batches in flight."""
        first: dict[object, int] = {}
        for stage, layers in enumerate(self.stage_layers(pp, chunks)):
            first.setdefault((frozenset(layers.items()), stage == 0, stage == pp - 1), stage)
        return tuple(first.values())

    def _stage_on_rank(
        self, pp: int, stage: int, *, tp: int, ep: int, chunks: int = 1
    ) -> RankParameters:
        """The parameters of one pipeline rank, on one of the ranks that share it."""
        return self._on_rank(self._stage_weights(pp, stage, chunks), tp=tp, ep=ep)

    def _stage_weights(self, pp: int, stage: int, chunks: int = 1) -> Iterator[tuple[Weight, int]]:
        """A pipeline rank's weights, each with how often it is there."""
        for kind, times in self.stage_layers(pp, chunks)[stage].items():
            yield from ((weight, times * n) for weight, n in self.kinds[kind].items())
        yield from ((weight, 1) for weight in self._ends(pp, stage))

    def _held_on_rank(
        self, pp: int, stage: int, *, tp: int, ep: int, num_shards: int, chunks: int = 1
    ) -> HeldWeights:
        """The tensors of one pipeline rank, on the largest of the ranks that share it."""
        return held_weights(
            self._stage_weights(pp, stage, chunks),
            tp=tp,
            ep=ep,
            num_shards=num_shards,
            num_key_value_heads=self.num_key_value_heads,
        )

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


def _size(weights: Counter[Weight]) -> int:
    return sum(weight.num_parameters * times for weight, times in weights.items())


def _cost(architecture: ArchitectureConfig, weights: Counter[Weight]) -> float:
    """Parameters that one token is multiplied with."""
    moe = architecture.moe
    share = moe.num_experts_per_token / moe.num_experts if moe else 1.0
    products = ((weight, times) for weight, times in weights.items() if weight.is_matmul)
    return sum(
        weight.num_parameters * times * (share if weight.module == "experts" else 1.0)
        for weight, times in products
    )


_REACH = 4
"""How far from its ideal place, in items, a boundary between parts is looked for."""
_Cut = tuple[float, float, tuple[int, ...]]
"""The heaviest part, the sum of squares, and how many items each part has."""


def even_parts(loads: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Cuts a sequence into parts of neighbours; how many items each has, none being empty.

    The heaviest part is as light as it can be near even shares, then the sum of squares least. Of
    equals, the one with fewer items in front: a pipeline's first stages keep most activations.
    """
    num_items, until = len(loads), list(accumulate(loads, initial=0.0))
    best: dict[int, _Cut] = {0: (0.0, 0.0, ())}
    for part in range(1, num_parts + 1):
        ideal = bisect_left(until, until[-1] * part / num_parts)
        last = num_items - (num_parts - part)
        first = max(part, min(ideal - _REACH, last))
        reached: dict[int, _Cut] = {}
        for stop in range(first, min(last, max(ideal + _REACH, first + num_parts)) + 1):
            options = [
                _extended(cut, until[stop] - until[start], stop - start)
                for start, cut in best.items()
                if start < stop
            ]
            if options:
                reached[stop] = min(options)
        best = reached
    return best[num_items][2]


def _extended(cut: _Cut, load: float, num_items: int) -> _Cut:
    heaviest, squares, counts = cut
    return max(heaviest, load), squares + load * load, (*counts, num_items)
