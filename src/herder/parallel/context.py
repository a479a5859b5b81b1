"""Context parallelism: each rank has a part of every micro-batch's tokens, and attention sees all.

Owns which tokens a rank has, and the attend that brings queries, keys and values of all ranks
together. Two ways: `ulysses` exchanges tokens for heads, so that each rank attends over whole
documents with a part of the heads; `ring` passes keys and values from rank to rank.

    tokens   0 1 2 3 4 5 6 7      chunks of T / 2S tokens
    rank 0   0             7      of S = 4: an early one and a late one, so that all ranks have as
    rank 1     1         6        much to do under a causal mask
    rank 2       2     5
    rank 3         3 4

Sources: DeepSpeed-Ulysses, arXiv:2309.14509, section 3; Ring Attention, arXiv:2310.01889, 3; the
order of chunks: Llama 3, arXiv:2407.21783, section 3.3.2.

Legend: T tokens of a micro-batch, S ranks, N query heads, K key-value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from herder.config.architecture import LayerSpec
from herder.config.run import ContextMethod
from herder.model.attend import Attend, PackedAttend
from herder.model.attention_spec import AttentionSpec
from herder.model.routing import Routing
from herder.parallel.collectives import exchange, gather_rows, sum_over
from herder.parallel.ring import Ring, RingAttend


class Context:
    """A rank's place among those that share every micro-batch; of one rank, all of it."""

    num_ranks = 1

    def part(self, x_T: Tensor) -> Tensor:
        """This rank's rows of all T."""
        return x_T

    def whole(self, x_T: Tensor) -> Tensor:
        """All T rows of every rank's part, in the order of tokens."""
        return x_T

    def total(self, x: Tensor) -> Tensor:
        """The sum over the ranks, whose gradient is the sum of theirs."""
        return x

    def attend(
        self,
        document_lengths: Sequence[int],
        *,
        device: str,
        routing: Routing | None,
        layers: Sequence[LayerSpec],
    ) -> Attend:
        """The attend of a micro-batch, whose documents hold T tokens."""
        return PackedAttend(document_lengths, device=device, routing=routing, layers=layers)


WHOLE_CONTEXT = Context()


class SplitContext(Context):
    """A rank's part of the tokens."""

    def __init__(self, mesh: DeviceMesh, method: ContextMethod) -> None:
        """mesh: of the context-parallel axis."""
        self.num_ranks = mesh.size()
        self._rank = mesh.get_local_rank()
        self._group = mesh.get_group()
        self._method = method
        self._orders: dict[tuple[int, str], Tensor] = {}

    def part(self, x_T: Tensor) -> Tensor:
        own = self.order_T(x_T.shape[0], x_T.device).chunk(self.num_ranks)[self._rank]
        return x_T.index_select(0, own)

    def whole(self, x_T: Tensor) -> Tensor:
        rows_T = gather_rows(x_T, self._group)
        return rows_T[self.order_T(len(rows_T), x_T.device).argsort()]

    def total(self, x: Tensor) -> Tensor:
        return sum_over(x, self._group)

    def attend(
        self,
        document_lengths: Sequence[int],
        *,
        device: str,
        routing: Routing | None,
        layers: Sequence[LayerSpec],
    ) -> Attend:
        if self._method == "ring":
            ring = Ring(document_lengths, self._group, device=device)
            return RingAttend(ring, self.part, routing=routing)
        whole = PackedAttend(document_lengths, device=device, layers=layers)
        order_T = self.order_T(sum(document_lengths), torch.device(device))
        return UlyssesAttend(whole, order_T, self, routing=routing)

    def order_T(self, num_tokens: int, device: torch.device) -> Tensor:
        """Places of all T tokens, those of the first rank first."""
        key = num_tokens, str(device)
        if key not in self._orders:
            num_chunks = 2 * self.num_ranks
            assert num_tokens % num_chunks == 0, f"{num_tokens} tokens in {num_chunks} chunks"
            chunks = torch.arange(num_tokens, device=device).chunk(num_chunks)
            pairs = [torch.cat([chunks[r], chunks[-1 - r]]) for r in range(self.num_ranks)]
            self._orders[key] = torch.cat(pairs)
        return self._orders[key]

    def heads_of_all(self, x_TNH: Tensor) -> Tensor:
        """[T, N / S, H] in order of ranks, of every rank's [T / S, N, H]."""
        parts = x_TNH.unflatten(1, (self.num_ranks, -1)).movedim(1, 0)
        return exchange(parts.contiguous(), self._group).flatten(0, 1)

    def tokens_of_one(self, x_TNH: Tensor) -> Tensor:
        """[T / S, N, H] of every rank's [T, N / S, H]: the way back."""
        parts = exchange(x_TNH.unflatten(0, (self.num_ranks, -1)).contiguous(), self._group)
        return parts.movedim(0, 1).flatten(1, 2)

    def own_heads(self, x_N: Tensor) -> Tensor:
        """Those of this rank."""
        return x_N.chunk(self.num_ranks)[self._rank]


class UlyssesAttend(Attend):
    """Attention over whole documents with a part of the heads.

    Key-value heads fewer than ranks are copied.
    """

    def __init__(
        self,
        whole: PackedAttend,
        order_T: Tensor,
        split: SplitContext,
        *,
        routing: Routing | None,
    ) -> None:
        self.whole = whole
        self.order_T = order_T
        self.place_T = order_T.argsort()
        self.split = split
        self.longest = whole.longest
        self.routing = routing

    def context_T(self) -> Tensor:
        return self.split.part(self.whole.context_T())

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        spec: AttentionSpec,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        num_ranks, num_kv_heads = self.split.num_ranks, k_TKH.shape[1]
        if num_kv_heads % num_ranks:
            copies = num_ranks // num_kv_heads
            k_TKH, v_TKH = (x.repeat_interleave(copies, dim=1) for x in (k_TKH, v_TKH))
        q, k, v = (self.split.heads_of_all(x)[self.place_T] for x in (q_TNH, k_TKH, v_TKH))
        own_sinks = None if sinks_N is None else self.split.own_heads(sinks_N)
        out_TNH = self.whole(q, k, v, spec, own_sinks)
        return self.split.tokens_of_one(out_TNH[self.order_T])
