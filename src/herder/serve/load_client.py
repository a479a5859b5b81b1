"""One load test's client: prompts of given lengths, requests at once or as they arrive, timings.

It speaks to any endpoint of the OpenAI API and sends standard fields alone. Owns what is measured;
which loads are tried and how they are shown is the load test's business.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from herder.errors import ResourceError

_WORDS = "river stone cloud market window garden letter bridge winter copper silver harbour forest"
_CALIBRATION_WORDS = (5, 20)
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Asked:
    """What every request of a load test asks for."""

    prompt_tokens: tuple[int, ...]
    """Lengths, each as likely as the others."""
    shared_prefix_tokens: int
    output_tokens: int
    """At most; an end of text may come before."""
    seed: int
    as_chat: bool


@dataclass(frozen=True)
class Sample:
    """One request, from the moment that it was due; times in seconds."""

    first_token_seconds: float | None
    """None: no text came."""
    seconds: float
    token_seconds: float | None
    """Between two tokens, on average; None where there were no two."""
    num_prompt_tokens: int
    num_completion_tokens: int
    error: str | None = None


Ask = Callable[[], Awaitable[Sample]]
"""One request that is yet to be made."""


class LoadClient:
    """Asks one server; use with `async with connected(...)`."""

    def __init__(self, http: httpx.AsyncClient, model: str, asked: Asked) -> None:
        self._http, self._model, self._asked = http, model, asked
        self._words_a_token, self._other_tokens = 1.0, 0.0

    async def calibrate(self) -> None:
        """Learn how many tokens a word is, and how many a chat's frame. Raises ResourceError."""
        counts = []
        for num_words in _CALIBRATION_WORDS:
            text = _text(random.Random(num_words), num_words)
            try:
                response = await self._http.post(self._path, json=self._body(text, most=1))
            except httpx.HTTPError as error:
                raise ResourceError(f"{self._http.base_url}: no answer: {error}") from None
            if response.status_code != 200:
                told = response.text[:300]
                raise ResourceError(
                    f"{response.url}: status {response.status_code} for a first request: {told}"
                )
            counts.append(response.json()["usage"]["prompt_tokens"])
        slope = (counts[1] - counts[0]) / (_CALIBRATION_WORDS[1] - _CALIBRATION_WORDS[0])
        self._words_a_token = 1 / slope
        self._other_tokens = counts[0] - slope * _CALIBRATION_WORDS[0]

    def prompt(self, key: str) -> str:
        """The prompt of one request; equal keys, seeds and servers give equal ones."""
        source = random.Random(f"{self._asked.seed}/{key}")
        length = source.choice(self._asked.prompt_tokens)
        num_words = max(1, round((length - self._other_tokens) * self._words_a_token))
        num_shared = round(self._asked.shared_prefix_tokens * self._words_a_token)
        shared = _text(random.Random(self._asked.seed), min(num_shared, num_words))
        return f"{shared} {_text(source, num_words - num_shared)}".strip()

    async def ask(self, prompt: str) -> Sample:
        """One streamed answer, timed. Whatever fails is told in the sample."""
        start = time.perf_counter()
        first = last = None
        num_chunks, usage, error = 0, dict[str, int](), None
        body = {**self._body(prompt, most=self._asked.output_tokens), "stream": True}
        body["stream_options"] = {"include_usage": True}
        try:
            async with self._http.stream("POST", self._path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    error = f"status {response.status_code}"
                async for event in _events(response):
                    usage = event.get("usage") or usage
                    error = "an error in the stream" if "error" in event else error
                    if any(map(_text_of, event.get("choices", ()))):
                        last = time.perf_counter()
                        first = first or last
                        num_chunks += 1
        except (httpx.HTTPError, ValueError) as failure:
            error = type(failure).__name__
        made = usage.get("completion_tokens", num_chunks)
        gaps = (last - first) / (made - 1) if first and last and made > 1 else None
        return Sample(
            first and first - start,
            time.perf_counter() - start,
            gaps,
            usage.get("prompt_tokens", 0),
            made,
            error,
        )

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self._asked.as_chat else "/v1/completions"

    def _body(self, text: str, *, most: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        prompt = {"messages": messages} if self._asked.as_chat else {"prompt": text}
        rest = {"max_tokens": most, "temperature": 1, "seed": self._asked.seed}
        return {"model": self._model, **prompt, **rest}


@asynccontextmanager
async def connected(url: str, api_key: str | None) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of the server at `url`, with as many connections as there are requests."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=timeout, limits=limits
    ) as http:
        yield http


async def model_card(http: httpx.AsyncClient, asked: str | None) -> dict[str, Any]:
    """The entry of /v1/models of the model asked for, or of the first. Raises ResourceError."""
    try:
        response = await http.get("/v1/models")
        response.raise_for_status()
        cards = {card["id"]: card for card in response.json()["data"]}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise ResourceError(
            f"{http.base_url}: no list of models at /v1/models: {error}. Start a server there, for "
            "example with `herder serve MODEL`, or give the URL of one without its path."
        ) from None
    if not cards or (asked is not None and asked not in cards):
        raise ResourceError(
            f"{http.base_url} serves {', '.join(cards) or 'no model'}, not {asked or 'any'}"
        )
    return cards[asked] if asked is not None else next(iter(cards.values()))


async def at_once(asks: Sequence[Ask], most: int) -> list[Sample]:
    """All of them, never more than `most` at a time."""
    gate = asyncio.Semaphore(most)

    async def gated(ask: Ask) -> Sample:
        async with gate:
            return await ask()

    return await asyncio.gather(*map(gated, asks))


async def as_they_arrive(asks: Sequence[Ask], per_second: float, seed: int) -> list[Sample]:
    """All of them, at the times of a Poisson process, whether earlier ones are done or not."""
    source, due, started = random.Random(seed), time.perf_counter(), []
    for ask in asks:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        started.append(asyncio.ensure_future(ask()))
        due += source.expovariate(per_second)
    return await asyncio.gather(*started)


def _text(source: random.Random, num_words: int) -> str:
    return " ".join(source.choices(_WORDS.split(), k=max(0, num_words)))


def _text_of(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


async def _events(response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
