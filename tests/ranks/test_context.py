"""Attention over ranks that share a sequence: what one process computes, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from herder.config.run import ContextMethod
from herder.model.attend import Attend
from herder.model.attention_spec import AttentionSpec
from herder.parallel.context import SplitContext
from herder.parallel.ranks import run_on_ranks
from tests.reference_attend import ReferenceAttend

LENGTHS = (5, 23, 1, 27, 8)
"""Of documents, 64 tokens: shorter and longer than a chunk of 8, across one and across several."""
HEAD_DIM = 8
SPECS = {
    "full": AttentionSpec("full", 0, 0.3),
    "sliding": AttentionSpec("sliding", 6, 0.3),
    "chunked": AttentionSpec("chunked", 5, 0.3),
    "capped": AttentionSpec("full", 0, 0.3, logit_softcap=0.5),
}


@dataclass(frozen=True)
class Case:
    """Heads of queries, of keys and values, and how wide values are."""

    method: ContextMethod
    spec: str
    heads: int = 4
    kv_heads: int = 4
    value_dim: int = HEAD_DIM
    sinks: bool = False

    @property
    def inputs(self) -> list[Tensor]:
        """q, k, v and, where there are any, sinks, with gradients."""
        generator = torch.Generator().manual_seed(7)
        num_tokens = sum(LENGTHS)
        shapes: list[tuple[int, ...]] = [
            (num_tokens, self.heads, HEAD_DIM),
            (num_tokens, self.kv_heads, HEAD_DIM),
            (num_tokens, self.kv_heads, self.value_dim),
        ]
        if self.sinks:
            shapes.append((self.heads,))
        return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


CASES = [
    *(Case("ring", spec, kv_heads=2) for spec in SPECS),
    *(Case("ulysses", spec) for spec in SPECS),
    *(Case(method, "sliding", kv_heads=2, sinks=True) for method in ("ring", "ulysses")),
    *(Case(method, "full", value_dim=5) for method in ("ring", "ulysses")),
    Case("ring", "full", heads=3, kv_heads=1),
]


def attended(attend: Attend, case: Case, inputs: list[Tensor], out_grad: Tensor) -> list[Tensor]:
    """The output and the gradients of the inputs."""
    q, k, v, *sinks = inputs
    out = attend(q, k, v, SPECS[case.spec], *sinks)
    return [out.detach(), *torch.autograd.grad(out, inputs, out_grad)]


def out_gradient(case: Case) -> Tensor:
    shape = (sum(LENGTHS), case.heads, case.value_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def attend_on_ranks(cases: list[Case]) -> list[list[Tensor]]:
    """This rank's rows of each case's output and gradients, and its gradient of the sinks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for case in cases:
        context = SplitContext(mesh, case.method)
        q, k, v, *sinks = case.inputs
        own = [context.part(x).detach().requires_grad_() for x in (q, k, v)]
        attend = context.attend(LENGTHS, device="cpu", routing=None, layers=())
        grad = context.part(out_gradient(case))
        assert torch.equal(attend.context_T(), context.part(ReferenceAttend(LENGTHS).context_T()))
        found.append(attended(attend, case, [*own, *sinks], grad))
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_attend_as_one_process_does(num_ranks: int) -> None:
    ranks = run_on_ranks(attend_on_ranks, num_ranks, CASES)
    order = places(num_ranks).argsort()
    for index, case in enumerate(CASES):
        expected = attended(ReferenceAttend(LENGTHS), case, case.inputs, out_gradient(case))
        rows = [
            torch.cat(parts)[order] for parts in zip(*(r[index][:4] for r in ranks), strict=True)
        ]
        sinks = [sum(parts) for parts in zip(*(r[index][4:] for r in ranks), strict=True)]
        for name, told, wanted in zip(
            ("out", "q", "k", "v", "sinks"), [*rows, *sinks], expected, strict=False
        ):
            torch.testing.assert_close(told, wanted, rtol=1e-5, atol=1e-6, msg=f"{case}: {name}")


def places(num_ranks: int) -> Tensor:
    """Of tokens in order of ranks: an early chunk and a late one each."""
    chunks = torch.arange(sum(LENGTHS)).chunk(2 * num_ranks)
    return torch.cat([torch.cat([chunks[r], chunks[-1 - r]]) for r in range(num_ranks)])


def blocks_of_each(kind: Any) -> list[int]:
    """How many pairs of chunks this rank computes."""
    from herder.parallel.ring import Ring

    group = dist.group.WORLD
    assert group is not None
    ring = Ring((64,), group, device="cpu")
    return [len(list(ring.blocks(owner, kind))) for owner in range(4)]


def test_every_rank_of_a_ring_has_as_much_to_do_and_windows_make_it_less() -> None:
    whole = [sum(each) for each in run_on_ranks(blocks_of_each, 4, SPECS["full"])]
    assert whole == [9, 9, 9, 9]
    windowed = [sum(each) for each in run_on_ranks(blocks_of_each, 4, SPECS["sliding"])]
    assert max(windowed) <= 4
