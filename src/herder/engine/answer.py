"""One answer as it grows: its text, where it ends, and the events that tell of it.

Nothing here knows how tokens are made, or when.
"""

from __future__ import annotations

from typing import Literal

from herder.engine.request import Event, Finished, Request, TokenLogprobs, TokenMade
from herder.engine.sampler import TokenSampler
from herder.engine.text import StopFilter


class Answer:
    """What one request has been told so far, and its sampler."""

    def __init__(
        self, request: Request, sampler: TokenSampler, *, end_ids: frozenset[int], longest: int
    ) -> None:
        """`end_ids` end the answer, and so does its token number `longest`."""
        params = request.params
        self.request = request
        self.sampler = sampler
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.num_made = 0
        self._stops = StopFilter(params.stop, include_stop=params.include_stop_str_in_output)
        self._end_ids = end_ids
        self._longest = longest

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> list[Event]:
        """The events of one more token: what may be shown of it, and the end where it brings it."""
        params, decoder = self.request.params, self.request.decoder
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

    def failed(self, reason: Literal["abort", "error"], error: Exception) -> Finished:
        """The closing event of an answer that was broken off."""
        return Finished(reason, len(self.request.prompt_ids), self.num_made, error=error)
