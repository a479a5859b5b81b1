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
    FinishReason,
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

PREFILL_CHUNK_TOKENS = 512
SCORED_CHUNK_TOKENS = 64
"""Smaller where the prompt is scored: whole rows of logits exist for a chunk at once."""


class Sequence:
    """One request while it is answered."""

    def __init__(self, request: Request, sampler: TokenSampler) -> None:
        params = request.params
        self.request = request
        self.sampler = sampler
        self.stops = StopFilter(params.stop, include_stop=params.include_stop_str_in_output)
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.num_made = 0
        self.next_id = 0
        """The last token made: what the next step's forward reads."""

    def finished(
        self,
        reason: FinishReason,
        *,
        text: str = "",
        stopped_by: str | int | None = None,
        error: Exception | None = None,
    ) -> Finished:
        """The closing event."""
        num_prompt_tokens = len(self.request.prompt_ids)
        return Finished(reason, num_prompt_tokens, self.num_made, text, stopped_by, error)


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
        config = decoder.config
        self.decoder = decoder
        self.device = weight.device
        self.limits = Limits(window_tokens, config.vocab_size)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.cache = KvCache(
            config, num_tokens=window_tokens, dtype=weight.dtype, device=weight.device
        )
        self._num_named_tokens = min(num_named_tokens or config.vocab_size, config.vocab_size)
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._positions_P = torch.arange(window_tokens, device=weight.device)
        self._token_1 = torch.empty(1, dtype=torch.int64, device=weight.device)
        self._only_row = LastTokenReadout(torch.zeros(1, dtype=torch.int64, device=weight.device))

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
        sampler = TokenSampler(
            request.params,
            request.prompt_ids,
            num_tokens=self._num_named_tokens,
            end_ids=sorted(self._end_ids(request)),
            device=self.device,
        )
        return Sequence(request, sampler)

    @torch.inference_mode()
    def step(self, sequence: Sequence) -> list[Event]:
        """One forward: a chunk of the prompt or one token. No events while the prompt is read."""
        prompt_ids, held = sequence.request.prompt_ids, self.cache.length
        if held >= len(prompt_ids):
            self._token_1.fill_(sequence.next_id)
            return self._advance(sequence, self._forward(self._token_1, self._only_row))
        scores = sequence.request.params.prompt_logprobs is not None
        num_tokens = min(
            SCORED_CHUNK_TOKENS if scores else self._prefill_chunk_tokens, len(prompt_ids) - held
        )
        chunk = prompt_ids[held : held + num_tokens]
        tokens_T = torch.tensor(chunk, dtype=torch.int64, device=self.device)
        is_last = held + num_tokens == len(prompt_ids)
        if scores:
            logits_TV = self._forward(tokens_T, None)
            self._score(sequence, logits_TV)
            logits_RV = logits_TV[-1:]
        else:
            last_R = torch.tensor([num_tokens - 1] if is_last else [], dtype=torch.int64)
            logits_RV = self._forward(tokens_T, LastTokenReadout(last_R.to(self.device)))
        return self._prompt_read(sequence, logits_RV) if is_last else []

    def _forward(self, tokens_T: Tensor, readout: LastTokenReadout | None) -> Tensor:
        num_tokens, held = tokens_T.numel(), self.cache.length
        positions_T = self._positions_P[held : held + num_tokens]
        attend = self.cache.attend(num_tokens)
        logits = self.decoder(tokens_T, positions_T=positions_T, attend=attend, readout=readout)
        self.cache.advance(num_tokens)
        return logits

    def _prompt_read(self, sequence: Sequence, logits_RV: Tensor) -> list[Event]:
        params = sequence.request.params
        events: list[Event] = []
        if params.prompt_logprobs is not None:
            events.append(PromptScored(tuple(sequence.prompt_logprobs)))
        if params.max_tokens == 0:
            return [*events, sequence.finished("length")]
        return events + self._advance(sequence, logits_RV)

    def _score(self, sequence: Sequence, logits_TV: Tensor) -> None:
        """Adds the log-probabilities of the prompt's tokens that follow this chunk's."""
        request, end = sequence.request, self.cache.length
        following = request.prompt_ids[end - logits_TV.shape[0] + 1 : end + 1]
        for logits_V, token_id in zip(logits_TV[: len(following)].float(), following, strict=True):
            scored = logprobs_of(
                logits_V,
                token_id,
                num_tokens=self._num_named_tokens,
                num_top=request.params.prompt_logprobs or 0,
            )
            sequence.prompt_logprobs.append(scored)

    def _advance(self, sequence: Sequence, logits_RV: Tensor) -> list[Event]:
        """Draw a token from the last row and tell what it did to the text."""
        params = sequence.request.params
        logits_V = logits_RV[-1].float()
        token_id = sequence.sampler.choose(logits_V)
        scored = None
        if params.logprobs is not None:
            scored = logprobs_of(
                logits_V, token_id, num_tokens=self._num_named_tokens, num_top=params.logprobs
            )
        sequence.next_id = token_id
        sequence.num_made += 1
        may_stop = sequence.num_made > params.min_tokens
        if may_stop and token_id in self._end_ids(sequence.request):
            return self._ended(sequence, token_id, scored)
        text = self._text_of(sequence, token_id, may_stop=may_stop)
        made = TokenMade(token_id, text, scored)
        if sequence.stops.found is not None:
            return [made, sequence.finished("stop", stopped_by=sequence.stops.found)]
        if sequence.num_made == self._longest(sequence.request):
            return [made, *self._closed(sequence, "length")]
        return [made]

    def _text_of(self, sequence: Sequence, token_id: int, *, may_stop: bool) -> str:
        decoder = sequence.request.decoder
        return (
            "" if decoder is None else sequence.stops.add(decoder.add(token_id), may_stop=may_stop)
        )

    def _ended(
        self, sequence: Sequence, token_id: int, scored: TokenLogprobs | None
    ) -> list[Event]:
        """An end token is counted and its text left out, unless the request asks for it."""
        params = sequence.request.params
        shown = params.include_stop_str_in_output and token_id in params.stop_token_ids
        text = self._text_of(sequence, token_id, may_stop=False) if shown else ""
        made = TokenMade(token_id, text, scored)
        return [made, *self._closed(sequence, "stop", stopped_by=token_id)]

    def _closed(
        self, sequence: Sequence, reason: FinishReason, *, stopped_by: int | None = None
    ) -> list[Event]:
        """The closing event with the text still held; a stop string in that text counts too."""
        decoder = sequence.request.decoder
        text = ""
        if decoder is not None:
            may_stop = sequence.num_made > sequence.request.params.min_tokens
            text = sequence.stops.add(decoder.finish(), may_stop=may_stop)
        if sequence.stops.found is not None:
            return [sequence.finished("stop", text=text, stopped_by=sequence.stops.found)]
        text += sequence.stops.finish()
        return [sequence.finished(reason, text=text, stopped_by=stopped_by)]

    def _end_ids(self, request: Request) -> frozenset[int]:
        ends = frozenset(request.params.stop_token_ids)
        return ends if request.params.ignore_eos else ends | self.eos_token_ids

    def _longest(self, request: Request) -> int:
        room_tokens = self.limits.window_tokens - len(request.prompt_ids)
        longest = request.params.max_tokens
        return room_tokens if longest is None else longest
