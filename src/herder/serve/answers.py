"""The answers to one HTTP request while the engine makes them, as parts that the formats write.

Owns the way from the engine's thread into the event loop, and where in the text each token stands.
A stream and a whole answer read the same parts, so that they cannot differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Self

from herder.data.tokenizer import Tokenizer
from herder.engine.engine import Generation, Listener
from herder.engine.request import (
    Event,
    Finished,
    FinishReason,
    PromptScored,
    Request,
    TokenLogprobs,
    TokenMade,
)
from herder.errors import UnavailableError
from herder.serve.service import Service


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the answer with its log-probabilities, at `text_offset` characters of its text."""

    logprobs: TokenLogprobs
    text_offset: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What one answer took."""

    num_prompt_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one choice gained: text to show, the tokens since the last part, or its end."""

    index: int
    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    prompt: PromptScored | None = None
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    usage: Usage | None = None


class TokenPlaces:
    """Where in a text its tokens stand, told one after the other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.detokenizer()
        self._length = 0

    def next(self, token_id: int) -> int:
        """The offset of the next token's text, in characters."""
        start = self._length
        text = self._decoder.add(token_id)
        self._length += len(text)
        # A token may also bring out the halves of characters that were held before it.
        own = self._tokenizer.decode([token_id])
        return self._length - len(own) if own and text.endswith(own) else start


class _Choice:
    """Turns one choice's events into parts; tokens without text yet wait for the next one."""

    def __init__(self, index: int, service: Service) -> None:
        self._index = index
        self._tokens: list[ScoredToken] = []
        self._places = TokenPlaces(service.tokenizer)

    def read(self, event: Event) -> Part | None:
        match event:
            case TokenMade():
                self._keep(event)
                return Part(self._index, event.text, self._taken()) if event.text else None
            case Finished():
                return self._end(event)
            case PromptScored():
                return Part(self._index, prompt=event)

    def _keep(self, event: TokenMade) -> None:
        if event.logprobs is not None:
            place = self._places.next(event.token_id)
            self._tokens.append(ScoredToken(event.logprobs, place))

    def _taken(self) -> tuple[ScoredToken, ...]:
        taken, self._tokens = tuple(self._tokens), []
        return taken

    def _end(self, event: Finished) -> Part:
        if event.error is not None:
            raise event.error
        usage = Usage(event.num_prompt_tokens, event.num_completion_tokens)
        return Part(
            self._index,
            event.text,
            self._taken(),
            finish_reason=event.reason,
            stopped_by=event.stopped_by,
            usage=usage,
        )


class Answers:
    """All choices of one HTTP request. Use as a context: leaving it ends what still runs."""

    def __init__(self, service: Service, requests: Sequence[Request], *, num_choices: int) -> None:
        """Queues all requests or none; raises as Engine.submit_all does."""
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._choices = [_Choice(index, service) for index in range(len(requests))]
        self._num_open = len(requests)
        listeners = [
            service.metrics.watch(self._listener(index), counts_prompt=index % num_choices == 0)
            for index in range(len(requests))
        ]
        self._generations: list[Generation] = service.engine.submit_all(requests, listeners)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End every choice within a step; nothing happens to those that are over."""
        for generation in self._generations:
            generation.cancel()

    async def parts(self) -> AsyncIterator[Part]:
        """The parts as they come, until every choice has ended. Raises what the engine raised."""
        while self._num_open:
            part = await self._next_part()
            if part is not None:
                yield part

    async def parts_or_silence(self, *, after_seconds: float) -> AsyncIterator[Part | None]:
        """The parts, and None each time nothing came for so long."""
        while self._num_open:
            try:
                async with asyncio.timeout(after_seconds):
                    index, event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            part = self._read(index, event)
            if part is not None:
                yield part

    async def _next_part(self) -> Part | None:
        return self._read(*await self._events.get())

    def _read(self, index: int, event: Event) -> Part | None:
        if isinstance(event, Finished):
            self._num_open -= 1
            if event.reason == "abort":
                raise UnavailableError("the request was ended before its answer was complete")
        return self._choices[index].read(event)

    def _listener(self, index: int) -> Listener:
        def listen(event: Event) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return listen
