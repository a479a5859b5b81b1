"""What the routers of one micro-batch are told and what they tell: padding, noise, statistics.

Owns the auxiliary losses too. Knows nothing of experts or of how tokens reach them. Plain classes,
as everything that is handed to a layer must be: FSDP rebuilds dataclasses and tuples.

Legend: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from herder.config.architecture import MoeConfig

_LOW_32_BITS = 0xFFFFFFFF
_Bits = TypeVar("_Bits", int, Tensor)


class RouterNoise:
    """Normal noise of one training step; std 0 is none at all."""

    def __init__(self, seed: int, step: int, std: float) -> None:
        self.seed = seed
        self.step = step
        self.std = std

    def key(self, layer: int) -> int:
        """32 bits that differ by seed, step and layer."""
        key = 0
        for part in (self.seed, self.step, layer):
            key = _mixed(key ^ _mixed((part + 1) & _LOW_32_BITS))
        return key


class ExpertCapacity:
    """How many choices an expert takes of one micro-batch: those of its first tokens.

    Source: GShard, arXiv:2006.16668, section 3.2; here a token's better choices do not come before
    other tokens' worse ones.
    """

    def __init__(
        self,
        choices: Tensor,
        *,
        whole: Callable[[Tensor], Tensor],
        part: Callable[[Tensor], Tensor],
    ) -> None:
        """choices: int64 scalar, of an expert. whole and part: of the tokens of a micro-batch,
        those that are here."""
        self._choices = choices
        self._whole = whole
        self._part = part

    def dropped_TK(self, chosen_TK: Tensor, num_experts: int) -> Tensor:
        """bool: choices that find no room."""
        whole_TK = self._whole(chosen_TK)
        counts_E = expert_counts(whole_TK, num_experts)
        chosen_R = whole_TK.flatten()
        order_R = chosen_R.argsort(stable=True)
        first_E = counts_E.cumsum(0) - counts_E
        first_E = torch.cat([first_E, counts_E.sum()[None]])  # and of those that chose none
        row_R = torch.arange(len(order_R), device=order_R.device)
        place_R = torch.empty_like(row_R).scatter(0, order_R, row_R) - first_E[chosen_R]
        dropped_R = (place_R >= self._choices) & (chosen_R < num_experts)
        return self._part(dropped_R.view_as(whole_TK))


class LayerRouting:
    """One layer's part of a Routing, and what its router recorded: sums over real tokens.

    A layer that recomputes records the same numbers again, into the object it was given and never
    into Routing.records.
    """

    counts_E: Tensor | None = None
    """int64, how many choices fell on each expert; they sum to K * num_tokens."""
    probability_sum_E: Tensor
    """fp32, of the softmax of the logits over all experts, with gradient."""
    z_sum: Tensor
    """fp32, of logsumexp(logits)^2, with gradient."""
    entropy_sum: Tensor
    """fp32, of the softmax' entropy in nats; at most num_tokens * ln E."""
    num_tokens: Tensor
    """fp32."""
    num_dropped: Tensor
    """int64: choices that found no room. They are in counts_E all the same."""

    def __init__(self, index: int, routing: Routing) -> None:
        self.index = index
        self.real_T = routing.real_T
        self.token_T = routing.token_T
        self.capacity = routing.capacity
        self.noise: tuple[Tensor, Tensor] | None = None
        noise = routing.noise
        if noise is not None and noise.std > 0:
            assert self.token_T is not None, "router noise needs token_T"
            device = self.token_T.device
            # As tensors: a compiled layer must not see numbers that change with layer and step.
            key = torch.tensor(noise.key(index), device=device)
            self.noise = key, torch.tensor(noise.std, device=device)

    def noise_TE(self, num_experts: int) -> Tensor | None:
        """fp32 noise to add to the logits: a function of seed, step, layer, token and expert."""
        if self.noise is None or self.token_T is None:
            return None
        key, std = self.noise
        expert_E = torch.arange(1, num_experts + 1, device=self.token_T.device)
        token_T = _mixed((self.token_T & _LOW_32_BITS) ^ key)
        bits_TE = _mixed(token_T[:, None] ^ _mixed(expert_E))
        return (_normal(bits_TE) * std).float()

    def dropped_TK(self, chosen_TK: Tensor, num_experts: int) -> Tensor | None:
        """bool: choices beyond an expert's capacity, which are counted; None: it has no limit."""
        self.num_dropped = torch.zeros((), dtype=torch.int64, device=chosen_TK.device)
        if self.capacity is None:
            return None
        dropped_TK = self.capacity.dropped_TK(chosen_TK, num_experts)
        self.num_dropped = dropped_TK.sum()
        return dropped_TK

    def record(self, logits_TE: Tensor, chosen_TK: Tensor) -> None:
        """Statistics of fp32 logits (noise included); chosen E is no choice."""
        probability_TE = logits_TE.softmax(-1)
        z_T = logits_TE.logsumexp(-1)
        with torch.no_grad():
            entropy_T = z_T - (probability_TE * logits_TE).sum(-1)
        real_T = torch.ones_like(z_T) if self.real_T is None else self.real_T.to(z_T.dtype)
        self.counts_E = expert_counts(chosen_TK, logits_TE.shape[1])
        self.probability_sum_E = (probability_TE * real_T[:, None]).sum(0)
        self.z_sum = (z_T.square() * real_T).sum()
        self.entropy_sum = (entropy_T * real_T).sum()
        self.num_tokens = real_T.sum()


class Routing:
    """The routing of one micro-batch: made with its attend, read after its forward.

    real_T: bool, False for padding, which is routed nowhere; None: all are real. token_T: int64,
    each token's place in the whole batch of the step, which noise depends on instead of on layout.
    """

    def __init__(
        self,
        real_T: Tensor | None,
        token_T: Tensor | None = None,
        noise: RouterNoise | None = None,
        capacity: ExpertCapacity | None = None,
    ) -> None:
        self.real_T = real_T
        self.token_T = token_T
        self.noise = noise
        self.capacity = capacity
        self.records: dict[int, LayerRouting] = {}
        """What each routed layer recorded."""

    def layer(self, index: int) -> LayerRouting:
        """What one layer is given; to be made outside the compiled layer."""
        return LayerRouting(index, self)

    def keep(self, layer: LayerRouting) -> None:
        """Keeps what a layer has recorded, if it is routed. To be called after its forward."""
        if layer.counts_E is not None:
            self.records[layer.index] = copy.copy(layer)


def expert_counts(chosen_TK: Tensor, num_experts: int) -> Tensor:
    """counts_E, int64: how often each expert was chosen; the choice `num_experts` is none."""
    chosen_R = chosen_TK.flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen_R.device)
    return counts.scatter_add(0, chosen_R, torch.ones_like(chosen_R))[:num_experts]


def routing_sums(records: Mapping[int, LayerRouting]) -> Tensor:
    """[2 E + 2] in fp32, with gradient: of all these layers the choices and the probabilities of
    each expert, then z and tokens. Sums of parts of a model add up to those of the whole.
    """
    layers = list(records.values())
    counts_E = torch.stack([_counts(each) for each in layers]).sum(0)
    probability_E = torch.stack([each.probability_sum_E for each in layers]).sum(0)
    z = torch.stack([each.z_sum for each in layers]).sum()
    num_tokens = torch.stack([each.num_tokens for each in layers]).sum()
    return torch.cat([counts_E.float(), probability_E, torch.stack([z, num_tokens])])


def num_routing_sums(moe: MoeConfig | None) -> int:
    """How many `routing_sums` there are."""
    return 0 if moe is None else 2 * moe.num_experts + 2


def routing_losses(sums: Tensor) -> Tensor:
    """[2]: the load-balancing loss and the z-loss of `routing_sums`.

    Load balancing: E * sum_e (choices of e a token) * (mean probability of e), all layers' tokens
    together. K where routing is balanced: choices are summed over K, not divided by it. Source:
    Switch Transformers, arXiv:2101.03961, equations 4 to 6, as transformers computes it for top-k.
    z: the mean of logsumexp(logits)^2 over all layers' tokens. Source: ST-MoE, arXiv:2202.08906, 3.
    """
    num_experts = (len(sums) - 2) // 2
    counts_E, probability_E, (z, num_tokens) = sums.split([num_experts, num_experts, 2])
    num_tokens = num_tokens.clamp(min=1)
    shares_E = counts_E.detach() / num_tokens  # a count has no gradient
    balancing = num_experts * (shares_E * (probability_E / num_tokens)).sum()
    return torch.stack([balancing, z / num_tokens])


def load_balancing_loss(records: Mapping[int, LayerRouting], num_experts: int) -> Tensor:
    """The first of `routing_losses`, of a whole model's layers."""
    sums = routing_sums(records)
    assert len(sums) == 2 * num_experts + 2, f"{len(sums)} sums of {num_experts} experts"
    return routing_losses(sums)[0]


def z_loss(records: Mapping[int, LayerRouting]) -> Tensor:
    """The second of `routing_losses`, of a whole model's layers."""
    return routing_losses(routing_sums(records))[1]


def _counts(record: LayerRouting) -> Tensor:
    assert record.counts_E is not None, f"layer {record.index} recorded nothing"
    return record.counts_E


def _mixed(bits: _Bits) -> _Bits:
    """32 bits scrambled. Source: C. Wellons, hash-prospector, the 15-12-15 function.

    Both factors are below 2^31, so that products of 32 bits stay within int64.
    """
    bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) & _LOW_32_BITS
    bits = ((bits ^ (bits >> 12)) * 0x297A2D39) & _LOW_32_BITS
    return bits ^ (bits >> 15)


def _normal(bits: Tensor) -> Tensor:
    """Standard normal fp64 numbers from 32 random bits each. Source: Box and Muller, 1958."""
    first, second = ((each.double() + 0.5) / 2**32 for each in (bits, _mixed(bits ^ 0x5BD1E995)))
    return torch.sqrt(-2 * torch.log(first)) * torch.cos(2 * math.pi * second)
