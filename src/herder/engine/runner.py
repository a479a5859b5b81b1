"""The token loop of one sequence: prefill in chunks, then one token a step, over a KV cache.

The model is the training model itself, and is left as it was found. Nothing here knows threads,
queues or HTTP: the engine calls `begin` and then `step` until an event says that it is over.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor

from herder.engine.request import (
    Event,
    Finished,
    Limits,
    PromptScored,
    Request,
    TokenLogprobs,
    TokenMade,
    check_request,
)
from herder.engine.sampler import TokenSampler, logprobs_of
from herder.engine.text import StopFilter
from herder.model.cache import KvCache
from herder.model.decoder import Decoder
from herder.model.readout import LastTokenReadout

PREFILL_CHUNK_TOKENS = 1024
"""A second chunk reads the first one from the cache, without a fused kernel: 512 cost a quarter."""
SCORED_CHUNK_TOKENS = 64
"""Smaller where the prompt is scored: whole rows of logits exist for a chunk at once."""


class Sequence:
    """One request while it is answered."""

    def __init__(
        self, request: Request, sampler: TokenSampler, *, end_ids: frozenset[int], longest: int
    ) -> None:
        """`end_ids` end the answer, and so does its token number `longest`."""
        params = request.params
        self.request = request
        self.sampler = sampler
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.num_made = 0
        self.next_id = 0
        """The last token made: what the next step's forward reads."""
        self._stops = StopFilter(params.stop, include_stop=params.include_stop_str_in_output)
        self._end_ids = end_ids
        self._longest = longest

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> list[Event]:
        """The events of one more token: what may be shown of it, and the end where it brings it."""
        params, decoder = self.request.params, self.request.decoder
        self.next_id = token_id
        self.num_made += 1
        may_stop = self.num_made > params.min_tokens
        is_end = self.sampler.is_over or (may_stop and token_id in self._end_ids)
        # An end token is counted and its text left out, unless the request asks for it.
        asked_for = params.include_stop_str_in_output and token_id in params.stop_token_ids
        text = ""
        if decoder is not None and (asked_for or not is_end):
            text = self._stops.add(decoder.add(token_id), may_stop=may_stop and not is_end)
        made = TokenMade(token_id, text, logprobs)
        if self._stops.found is None and not is_end and self.num_made < self._longest:
            return [made]
        return [made, self.finished(may_stop=may_stop, end_id=token_id if is_end else None)]

    def finished(self, *, may_stop: bool = False, end_id: int | None = None) -> Finished:
        """The closing event with the text still held; a stop string in that text counts too."""
        decoder, text = self.request.decoder, ""
        if decoder is not None and self._stops.found is None:
            text = self._stops.add(decoder.finish(), may_stop=may_stop) + self._stops.finish()
        stopped_by = end_id if self._stops.found is None else self._stops.found
        reason = "length" if stopped_by is None else "stop"
        return Finished(reason, len(self.request.prompt_ids), self.num_made, text, stopped_by)


class Runner:
    """Answers one request at a time with one model and one cache as long as the window."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        window_tokens: int,
        eos_token_ids: Iterable[int],
        num_named_tokens: int | None = None,
        prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    ) -> None:
        """`num_named_tokens`: ids the tokenizer has; the head's padding rows past it are never
        drawn. None: all of them."""
        weight = next(decoder.parameters())
        config, device = decoder.config, weight.device
        self.decoder = decoder
        self.device = device
        self.limits = Limits(window_tokens, config.vocab_size)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.cache = KvCache(config, num_tokens=window_tokens, dtype=weight.dtype, device=device)
        self._num_named_tokens = min(num_named_tokens or config.vocab_size, config.vocab_size)
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._positions_P = torch.arange(window_tokens, device=device)
        self._token_1 = torch.empty(1, dtype=torch.int64, device=device)
        self._only_row = LastTokenReadout(torch.zeros(1, dtype=torch.int64, device=device))

    @contextmanager
    def serving(self) -> Generator[None]:
        """The model in evaluation mode inside, every module as it was after."""
        training = [module for module in self.decoder.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def begin(self, request: Request) -> Sequence:
        """Take up a request in place of the last one. Raises RequestError where it does not fit."""
        check_request(request, self.limits)
        self.cache.truncate(0)
        params = request.params
        end_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_ids |= self.eos_token_ids
        sampler = TokenSampler(
            params,
            request.prompt_ids,
            num_tokens=self._num_named_tokens,
            end_ids=sorted(end_ids),
            device=self.device,
            constraint=request.constraint,
        )
        longest = self.limits.longest_answer(request)
        return Sequence(request, sampler, end_ids=end_ids, longest=longest)

    @torch.inference_mode()
    def step(self, sequence: Sequence) -> list[Event]:
        """One forward: a chunk of the prompt or one token. No events while the prompt is read."""
        prompt_ids, params = sequence.request.prompt_ids, sequence.request.params
        held = self.cache.length
        num_left = len(prompt_ids) - held
        if num_left <= 0:
            self._token_1.fill_(sequence.next_id)
            return self._advance(sequence, self._forward(self._token_1, self._only_row))
        scores = params.prompt_logprobs is not None
        most = SCORED_CHUNK_TOKENS if scores else self._prefill_chunk_tokens
        chunk = prompt_ids[held : held + min(most, num_left)]
        is_last = len(chunk) == num_left
        rows = [len(chunk) - 1] if is_last else []
        readout = None if scores else LastTokenReadout(self._ids(rows))
        logits_RV = self._forward(self._ids(chunk), readout)
        if scores:
            self._score(sequence, logits_RV)
        if not is_last:
            return []
        events: list[Event] = [PromptScored(tuple(sequence.prompt_logprobs))] if scores else []
        if params.max_tokens == 0:
            return [*events, sequence.finished()]
        return events + self._advance(sequence, logits_RV)

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self.device)

    def _forward(self, tokens_T: Tensor, readout: LastTokenReadout | None) -> Tensor:
        num_tokens, held = tokens_T.numel(), self.cache.length
        positions_T = self._positions_P[held : held + num_tokens]
        attend = self.cache.attend(num_tokens)
        logits = self.decoder(tokens_T, positions_T=positions_T, attend=attend, readout=readout)
        self.cache.advance(num_tokens)
        return logits

    def _score(self, sequence: Sequence, logits_TV: Tensor) -> None:
        """Adds the log-probabilities of the prompt's tokens that follow this chunk's."""
        request, end = sequence.request, self.cache.length
        following = request.prompt_ids[end - logits_TV.shape[0] + 1 : end + 1]
        for logits_V, token_id in zip(logits_TV[: len(following)].float(), following, strict=True):
            scored = self._logprobs(logits_V, token_id, request.params.prompt_logprobs)
            sequence.prompt_logprobs.append(scored)

    def _logprobs(
        self, logits_V: Tensor, token_id: int, num_top: int | None
    ) -> TokenLogprobs | None:
        if num_top is None:
            return None
        return logprobs_of(logits_V, token_id, num_tokens=self._num_named_tokens, num_top=num_top)

    def _advance(self, sequence: Sequence, logits_RV: Tensor) -> list[Event]:
        """Draw a token from the last row and tell what it did to the text."""
        logits_V = logits_RV[-1].float()
        token_id = sequence.sampler.choose(logits_V)
        logprobs = self._logprobs(logits_V, token_id, sequence.request.params.logprobs)
        return sequence.take(token_id, logprobs)
