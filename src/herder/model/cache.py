"""A key-value cache for one sequence, for checks that decode without an engine."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from herder.config.architecture import ArchitectureConfig
from herder.errors import RequestError
from herder.model.paged import KvPages, PagedAttend, Span, layer_groups

_BLOCK_TOKENS = 4


class KvCache:
    """Blocks that one sequence takes in order, and keeps."""

    def __init__(
        self,
        config: ArchitectureConfig,
        *,
        num_tokens: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> None:
        num_groups, num_blocks = len(layer_groups(config)), -(-num_tokens // _BLOCK_TOKENS)
        self.pages = KvPages(
            config,
            num_blocks=[num_blocks] * num_groups,
            block_size=_BLOCK_TOKENS,
            dtype=dtype,
            device=device,
        )
        self.num_tokens = num_tokens
        """How many tokens there is room for."""
        self.length = 0
        self._tables = [array("q", range(num_blocks))] * num_groups

    def attend(self, num_new_tokens: int) -> PagedAttend:
        """The attend of one forward over the next num_new_tokens tokens, which it writes.

        Raises RequestError where they do not fit.
        """
        end = self.length + num_new_tokens
        if end > self.num_tokens:
            raise RequestError(
                f"{end} tokens do not fit a key-value cache of {self.num_tokens} tokens"
            )
        return PagedAttend(self.pages, [Span(self.length, num_new_tokens, end, self._tables)])

    def positions_T(self, num_new_tokens: int) -> Tensor:
        """The positions of the next num_new_tokens tokens."""
        return torch.arange(self.length, self.length + num_new_tokens, device=self.pages.device)

    def advance(self, num_new_tokens: int) -> None:
        """Counts tokens that a finished forward has written."""
        self.length += num_new_tokens
