"""The attend seam: what attention sees and remembers. Layers hand over q, k and v; this decides.

Legend: T this rank's packed tokens, N query heads, K key-value heads, H head dim (of values it may
differ). Latent attention: C latent dim, P unrotated and R rotated head dim, V value head dim.

An attend is built once a micro-batch, with its documents, and is pure in training: recomputation
calls it twice. It is a plain class and must stay one (no dataclass, tuple or pytree node): FSDP
rebuilds those on their way into a block and casts the tensors inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from herder.config.architecture import LayerSpec
from herder.model import flex
from herder.model.attention_spec import AttentionSpec, MaskKind
from herder.model.linear import product
from herder.model.packed_attention import packed_attention
from herder.model.routing import Routing


class Attend:
    """What every attend offers the decoder; subclasses add the attention itself."""

    longest: int
    """One more than the largest position of this forward, as a host number."""
    routing: Routing | None = None
    """What routers are told and tell in this forward; None: no padding, no noise, no statistics."""

    def layer(self, index: int) -> Attend:
        """The attend of one layer, bound outside the compiled block (so it is one graph a kind)."""
        del index
        return self

    def context_T(self) -> Tensor:
        """How many positions each token's document holds by the end of this forward."""
        raise TypeError(f"{type(self).__name__} does not say how long documents are")

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        spec: AttentionSpec,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """out_TNH. Query head n reads key-value head n // (N / K).

        sinks_N: one more logit a head, which takes its share of the softmax and attends to nothing.
        """
        raise TypeError(f"{type(self).__name__} does not attend")

    def latent(
        self,
        q_nope_TNP: Tensor,
        q_rope_TNR: Tensor,
        latent_TC: Tensor,
        k_rope_TR: Tensor,
        up: Callable[[], Tensor],
        spec: AttentionSpec,
    ) -> Tensor:
        """out_TNV of latent attention, whose latent is expanded to keys and values of every head.

        up: gives what expands it, [N, P + V, C], a head's key rows first. The key's rotated part is
        one for all heads. Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
        """
        up_NXC = up()
        num_heads, width, _ = up_NXC.shape
        expanded_TNX = product(latent_TC, up_NXC.flatten(0, 1)).unflatten(1, (num_heads, width))
        k_nope_TNP, v_TNV = expanded_TNX.tensor_split((q_nope_TNP.shape[-1],), -1)
        k_rope_TNR = k_rope_TR[:, None].expand(-1, num_heads, -1)
        q_TNH = torch.cat((q_nope_TNP, q_rope_TNR), -1)
        return self(q_TNH, torch.cat((k_nope_TNP, k_rope_TNR), -1), v_TNV, spec)


class PackedAttend(Attend):
    """Documents packed one after the other, positions counted from each one's start.

    Fused attention, without a T x T mask: on a GPU one kernel call a layer, elsewhere one a run
    of documents of equal length.

    layers: of the model, where known: what their kinds need is then made here and once, and not in
    a compiled layer, which would make it each time.
    """

    def __init__(
        self,
        document_lengths: Sequence[int],
        *,
        device: str = "cpu",
        routing: Routing | None = None,
        layers: Sequence[LayerSpec] = (),
    ) -> None:
        self.document_lengths = tuple(document_lengths)
        self.longest = max(self.document_lengths)
        self.device = device
        self.bounds = torch.tensor([0, *accumulate(self.document_lengths)])
        self.routing = routing
        # One graph for any number of documents, once compiled.
        torch._dynamo.maybe_mark_dynamic(self.bounds, 0)
        self._uses_flex = device.startswith("cuda") and flex.is_available()
        self._masks: dict[tuple[MaskKind, int], BlockMask] = {}
        if self._uses_flex:
            for kind, window in {(layer.attention, layer.window or 0) for layer in layers}:
                self._masks[kind, window] = self._made_mask(kind, window)

    def context_T(self) -> Tensor:
        lengths = torch.tensor(self.document_lengths)
        return lengths.repeat_interleave(lengths).to(self.device)

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        spec: AttentionSpec,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        if self._uses_flex and flex.takes(q_TNH, v_TKH):
            mask = self._mask(spec.kind, spec.window)
            return flex.attend_flex(q_TNH, k_TKH, v_TKH, mask, spec, sinks_N)
        return packed_attention(q_TNH, k_TKH, v_TKH, self.bounds, spec, sinks_N)

    def _mask(self, kind: MaskKind, window: int) -> BlockMask:
        mask = self._masks.get((kind, window))
        if mask is None:
            mask = self._made_mask(kind, window)
            if not torch.compiler.is_compiling():
                self._masks[kind, window] = mask
        return mask

    def _made_mask(self, kind: MaskKind, window: int) -> BlockMask:
        lengths = self.document_lengths
        return flex.block_mask(flex.first_keys(lengths, kind, window, device=self.device))
