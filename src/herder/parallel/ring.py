"""Ring attention: keys and values travel from rank to rank, and each adds what its queries see.

Legend: C tokens of a chunk, two to a rank; N query heads, K key-value heads, H head dim, V of
values; Q rows of queries at a time.

A query meets its own chunk first, so that every row of the softmax has a sum before others are
added to it. Chunks of which a mask shows nothing cost nothing. Source: arXiv:2310.01889, section 3;
the sums of softmaxes: FlashAttention, arXiv:2205.14135, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from herder.model.attend import Attend
from herder.model.attention_spec import AttentionSpec
from herder.model.autograd import Function
from herder.model.routing import Routing

_ROWS = 512
"""Of queries at a time: bounds the logits, which are N x Q x C in fp32."""


class Ring:
    """The documents of one micro-batch, cut into two chunks a rank."""

    def __init__(
        self, document_lengths: Sequence[int], group: dist.ProcessGroup, *, device: str
    ) -> None:
        self.lengths = torch.tensor(document_lengths)
        self.group = group
        self.rank, self.num_ranks = group.rank(), group.size()
        self.device = device
        document_T = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        position_T = torch.cat([torch.arange(length) for length in document_lengths])
        num_chunks = 2 * self.num_ranks
        self._documents = document_T.to(device).chunk(num_chunks)
        self._positions = position_T.to(device).chunk(num_chunks)

    def context_T(self) -> Tensor:
        """How many tokens each token's document holds, of all T."""
        return self.lengths.repeat_interleave(self.lengths).to(self.device)

    def chunks_of(self, rank: int) -> tuple[int, int]:
        """Which chunks a rank has, in the order of its rows."""
        return rank, 2 * self.num_ranks - 1 - rank

    def blocks(self, owner: int, spec: AttentionSpec) -> Iterator[tuple[slice, slice, Tensor]]:
        """(rows of this rank's queries, rows of the owner's keys, mask_QC) that have anything."""
        size = len(self._positions[0])
        for row, query in enumerate(self.chunks_of(self.rank)):
            for column, key in enumerate(self.chunks_of(owner)):
                if key > query:
                    continue
                for start in range(0, size, _ROWS):
                    part = slice(start, min(start + _ROWS, size))
                    mask_QC = self._mask(query, key, part, spec)
                    if bool(mask_QC.any()):
                        rows = slice(row * size + part.start, row * size + part.stop)
                        yield rows, slice(column * size, (column + 1) * size), mask_QC

    def _mask(self, query: int, key: int, rows: slice, spec: AttentionSpec) -> Tensor:
        same = self._documents[query][rows, None] == self._documents[key]
        return same & spec.allows(self._positions[query][rows, None], self._positions[key])

    def travel(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(owner, what it has) from this rank on; what comes next is on its way meanwhile."""
        for step in range(self.num_ranks):
            following, wait = x, None
            if step < self.num_ranks - 1:
                following, wait = self.pass_on(x)
            yield (self.rank - step) % self.num_ranks, x
            if wait is not None:
                wait()
            x = following

    def pass_on(self, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """(what comes from the rank before, what waits for it): x goes to the next rank."""
        received = torch.empty_like(x)
        after, before = (self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
        ]
        works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            for work in works:
                work.wait()

        return received, wait


class RingAttend(Attend):
    """Attention of this rank's queries to the keys of all ranks."""

    def __init__(
        self, ring: Ring, part: Callable[[Tensor], Tensor], *, routing: Routing | None
    ) -> None:
        self.ring = ring
        self.part = part
        self.longest = int(ring.lengths.max())
        self.routing = routing

    def context_T(self) -> Tensor:
        return self.part(self.ring.context_T())

    @torch.compiler.disable
    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        spec: AttentionSpec,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        out_TNV, logsumexp_TN = _RingAttention.apply(q_TNH, k_TKH, v_TKH, self.ring, spec)
        if sinks_N is None:
            return out_TNV
        # A sink adds to the sum that shares are divided by, and to nothing else.
        return out_TNV * torch.sigmoid(logsumexp_TN - sinks_N.float())[..., None].to(out_TNV.dtype)


class _RingAttention(Function):
    """(out_TNV, logsumexp_TN in fp32)."""

    @staticmethod
    def forward(
        ctx: Any, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, ring: Ring, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        out = q_TNH.new_zeros(*q_TNH.shape[:2], v_TKV.shape[-1], dtype=torch.float32)
        logsumexp = out.new_full(out.shape[:2], -torch.inf)
        widths = [k_TKH.shape[-1], v_TKV.shape[-1]]
        for owner, held in ring.travel(torch.cat((k_TKH, v_TKV), -1)):
            keys, values = held.split(widths, -1)
            # This rank's later chunk sees the earlier one: its own comes first.
            for rows, columns, mask_QC in sorted(
                ring.blocks(owner, spec), key=lambda block: -block[1].start
            ):
                logits_NQC = _logits(q_TNH[rows], keys[columns], mask_QC, spec)
                found_QN = logits_NQC.logsumexp(-1).T
                values_CNV = _as_many_heads(values[columns], q_TNH.shape[1]).float()
                both_QN = torch.logaddexp(logsumexp[rows], found_QN)
                shares_NQC = (logits_NQC - both_QN.T[..., None]).exp_()
                out[rows] *= (logsumexp[rows] - both_QN).exp_()[..., None]
                out[rows] += torch.einsum("nqc,cnv->qnv", shares_NQC, values_CNV)
                logsumexp[rows] = both_QN
        out_TNV = out.to(q_TNH.dtype)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKV, out_TNV, logsumexp)
        ctx.ring, ctx.spec = ring, spec
        return out_TNV, logsumexp

    @staticmethod
    def backward(
        ctx: Any, grad_TNV: Tensor, logsumexp_grad_TN: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Keys and values travel once more, and with them the gradients that they have so far."""
        q_TNH, k_TKH, v_TKV, out_TNV, logsumexp_TN = ctx.saved_tensors
        ring, spec = ctx.ring, ctx.spec
        grad_TNV = grad_TNV.float()
        # Of a logit: share * (grad . value - grad . out + the gradient of the logsumexp).
        rest_TN = logsumexp_grad_TN - (grad_TNV * out_TNV.float()).sum(-1)
        q_grad = torch.zeros_like(q_TNH, dtype=torch.float32)
        widths = [k_TKH.shape[-1], v_TKV.shape[-1]]
        held_grad = q_grad.new_zeros(*k_TKH.shape[:2], sum(widths))
        for owner, held in ring.travel(torch.cat((k_TKH, v_TKV), -1)):
            keys, values = held.split(widths, -1)
            k_grad, v_grad = held_grad.split(widths, -1)
            for rows, columns, mask_QC in ring.blocks(owner, spec):
                with torch.enable_grad():
                    q = q_TNH[rows].detach().requires_grad_()
                    k = keys[columns].detach().requires_grad_()
                    logits_NQC = _logits(q, k, mask_QC, spec)
                shares_NQC = (logits_NQC.detach() - logsumexp_TN[rows].T[..., None]).exp_()
                values_CNV = _as_many_heads(values[columns], q.shape[1]).float()
                value_grad_CNV = torch.einsum("nqc,qnv->cnv", shares_NQC, grad_TNV[rows])
                v_grad[columns] += _as_few_heads(value_grad_CNV, values.shape[1])
                products_NQC = torch.einsum("qnv,cnv->nqc", grad_TNV[rows], values_CNV)
                logits_grad = shares_NQC * (products_NQC + rest_TN[rows].T[..., None])
                q_part, k_part = torch.autograd.grad(logits_NQC, (q, k), logits_grad)
                q_grad[rows] += q_part
                k_grad[columns] += k_part
            held_grad, wait = ring.pass_on(held_grad)
            wait()
        k_grad, v_grad = held_grad.split(widths, -1)
        grads = (q_grad.to(q_TNH.dtype), k_grad.to(k_TKH.dtype), v_grad.to(v_TKV.dtype))
        return *grads, None, None


def _logits(q_QNH: Tensor, k_CKH: Tensor, mask_QC: Tensor, spec: AttentionSpec) -> Tensor:
    """[N, Q, C] in fp32, -inf where a query does not see a key."""
    k_CNH = _as_many_heads(k_CKH, q_QNH.shape[1])
    products = torch.einsum("qnh,cnh->nqc", q_QNH.float(), k_CNH.float())
    return spec.logits(products).masked_fill(~mask_QC, -torch.inf)


def _as_many_heads(x_CKH: Tensor, num_heads: int) -> Tensor:
    return x_CKH.repeat_interleave(num_heads // x_CKH.shape[1], dim=1)


def _as_few_heads(x_CNH: Tensor, num_heads: int) -> Tensor:
    return x_CNH.unflatten(1, (num_heads, -1)).sum(2)
