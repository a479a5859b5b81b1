"""Attention over packed documents on GPUs: one fused kernel for all kinds of layers, no T x T mask.

A query sees the keys from a first one to itself, whatever the kind of layer: since its document,
its chunk or its window began. So a kind of layer is one number a token, which the kernel reads, and
a table of blocks, most of which it skips or need not mask. Knows no layers.

Legend: T packed tokens, N query heads, K key-value heads, H head dim of queries and keys, V of
values, D documents, Q blocks of queries, S blocks of keys.

Source: FlexAttention, arXiv:2412.05496.
"""

from __future__ import annotations

import importlib.util
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from herder.model.attention_spec import AttentionSpec, MaskKind
from herder.model.linear import product_dtype

BLOCK = 128
"""Tokens of a block. The kernels' own tiles divide it."""
SMALLEST_HEAD = 16
"""Tensor cores multiply no narrower matrices."""


def is_available() -> bool:
    """Whether kernels can be made here: Triton, and the C compiler that it calls.

    Not in the threads of nn.DataParallel: torch would make them again for each device.
    """
    return threading.current_thread() is threading.main_thread() and _has_tools()


@cache
def _has_tools() -> bool:
    has_compiler = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    return importlib.util.find_spec("triton") is not None and has_compiler


def takes(q_TNH: Tensor, v_TKV: Tensor) -> bool:
    """Whether heads are wide enough for the kernel."""
    return min(q_TNH.shape[-1], v_TKV.shape[-1]) >= SMALLEST_HEAD


def first_keys(
    document_lengths: Sequence[int], kind: MaskKind, window: int, *, device: str
) -> Tensor:
    """int32 [T]: the first key that each query sees; it never decreases. Waits for no device.

    The rule is `AttentionSpec.allows`.
    """
    num_tokens = sum(document_lengths)
    length_D = torch.tensor(document_lengths, dtype=torch.int32).to(device, non_blocking=True)
    start_D = length_D.cumsum(0, dtype=torch.int32) - length_D
    start_T = start_D.repeat_interleave(length_D, output_size=num_tokens)
    token_T = torch.arange(num_tokens, dtype=torch.int32, device=device)
    if kind == "sliding":
        return torch.maximum(start_T, token_T - window + 1)
    if kind == "chunked":
        return start_T + (token_T - start_T) // window * window
    return start_T


def block_mask(first_T: Tensor) -> BlockMask:
    """Which blocks of keys a block of queries has to look at, and which of them it sees whole.

    Made of the first and last row of each block, since first keys never decrease: what
    `create_block_mask` makes of [T, T].
    """
    num_tokens = first_T.shape[0]
    num_blocks = -(-num_tokens // BLOCK)
    block_S = torch.arange(num_blocks, dtype=torch.int32, device=first_T.device)
    block_Q1 = block_S[:, None]
    last_Q = ((block_S + 1) * BLOCK - 1).clamp(max=num_tokens - 1)
    lowest_Q1, highest_Q1 = first_T[::BLOCK, None], first_T[last_Q][:, None]
    is_seen_QS = (block_S >= lowest_Q1 // BLOCK) & (block_S <= block_Q1)
    is_before_QS = (block_S < block_Q1) & (block_Q1 < num_tokens // BLOCK)
    is_whole_QS = is_before_QS & (block_S * BLOCK >= highest_Q1)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return (key <= query) & (key >= first_T[query])

    return BlockMask.from_kv_blocks(
        *_listed(is_seen_QS & ~is_whole_QS),
        *_listed(is_whole_QS),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(num_tokens, num_tokens),
    )


def attend_flex(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKV: Tensor,
    mask: BlockMask,
    spec: AttentionSpec,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """out_TNV. Where the caller is compiled the kernel is part of its graph.

    On a CPU, which has no such kernel for gradients, the whole matrix of scores is computed.
    """
    dtype = product_dtype(q_TNH)  # the kernel takes one, and knows no autocast
    result = _kernel(q_TNH.device)(
        *(x.to(dtype).transpose(0, 1)[None] for x in (q_TNH, k_TKH, v_TKV)),
        score_mod=None if spec.logit_softcap is None else _capped(spec.logit_softcap),
        block_mask=mask,
        scale=spec.scale,
        enable_gqa=q_TNH.shape[1] != k_TKH.shape[1],
        return_aux=None if sinks_N is None else AuxRequest(lse=True),
    )
    if sinks_N is None:
        return result[0].transpose(0, 1)
    out, aux = result
    # What is left of each share once the sink has taken its own.
    left_TN = torch.sigmoid(aux.lse[0].transpose(0, 1) - sinks_N.float())
    return (out[0].transpose(0, 1) * left_TN[..., None]).to(dtype)


def _listed(is_wanted_QS: Tensor) -> tuple[Tensor, Tensor]:
    """int32 (how many blocks each row wants [1, 1, Q], which, those first [1, 1, Q, S])."""
    counts_Q = is_wanted_QS.sum(-1, dtype=torch.int32)
    order_QS = is_wanted_QS.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts_Q[None, None], order_QS[None, None]


def _capped(cap: float) -> Callable[..., Tensor]:
    """The kernel's score is q.k, scaled already."""

    def cap_score(score: Tensor, *_places: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return cap_score


def _kernel(device: torch.device) -> Callable[..., Any]:
    if torch.compiler.is_compiling() or device.type == "cpu":
        return flex_attention
    return _compiled()


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)
