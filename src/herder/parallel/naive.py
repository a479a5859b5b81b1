"""nn.DataParallel, the cautionary example: one process, a thread a device, all state on the first.

Whole micro-batches are scattered, never cut: documents stay in one piece. Every forward copies the
parameters to all devices, gathers hidden states on the first one, which computes every loss, and
every backward brings all gradients there. Kept to be compared with; `plan.naive` predicts what it
takes of each device. Legend: T packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from herder.model.decoder import Decoder
from herder.model.rope import Rope
from herder.parallel.pipeline import Work, view_of_stage


class NaiveDataParallel:
    """Takes a step's micro-batches through copies of a dense decoder, as many at once as devices.

    It stands where a pipeline does: the layers are its first stage, which is copied, and the head
    its last one, which stays on the first device.
    """

    tied_copy: None = None
    """A tied embedding is one parameter here."""

    def __init__(self, decoder: Decoder, *, num_tokens: int, num_devices: int) -> None:
        """num_tokens: of a micro-batch. num_devices: GPUs, from the decoder's own on; else 1."""
        self.num_tokens = num_tokens
        self.num_forwards = num_devices
        self._head = view_of_stage(decoder, (), 1, 2)
        layers = _Layers(view_of_stage(decoder, tuple(decoder.layers), 0, 2))
        self._layers = ScatteredWorks(layers, device_ids=list(range(num_devices)))

    def run(self, works: Sequence[Work]) -> None:
        """Forward and backward of a step's micro-batches; gradients end on the first device."""
        for losses in self._losses(works):
            torch.stack(losses).sum().backward()

    def run_forward(self, works: Sequence[Work]) -> None:
        """The forwards alone, without gradients."""
        with torch.no_grad():
            for _ in self._losses(works):
                pass

    def _losses(self, works: Sequence[Work]) -> Iterator[list[Tensor]]:
        for start in range(0, len(works), self.num_forwards):
            group = works[start : start + self.num_forwards]
            hidden = self._layers(group).chunk(len(group))
            pairs = zip(group, hidden, strict=True)
            yield [work.forward(self._head, hidden_TD, None)[0] for work, hidden_TD in pairs]


class ScatteredWorks(nn.DataParallel[nn.Module]):
    """Each device gets one micro-batch, where nn.DataParallel would cut tensors."""

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> tuple[list[tuple[list[Work]]], list[dict[str, Any]]]:
        """([arguments of each device], [no keywords])."""
        (works,) = inputs
        assert len(works) <= len(device_ids), f"{len(works)} works, {len(device_ids)} devices"
        assert not kwargs, f"no keywords are scattered: {kwargs}"
        return [([work],) for work in works], [{} for _ in works]


class _Layers(nn.Module):
    """A decoder without its head, as nn.DataParallel copies and calls it: with one work a device.

    Without a GPU there is one call, with all works, of which there is one then.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, works: Sequence[Work]) -> Tensor:
        """hidden_TD."""
        (work,) = works
        # Each has its table on one device, which threads of several devices must not share.
        self.decoder.ropes = [Rope(rope) for rope in self.decoder.config.ropes]
        embed = self.decoder.embed
        assert embed is not None, "the first stage has the embedding"
        hidden_TD, _ = work.forward(self.decoder, work.tokens_T.to(embed.weight.device), None)
        return hidden_TD
