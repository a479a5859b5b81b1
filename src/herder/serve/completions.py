"""/v1/completions: the body's prompts as requests, and how its choices are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from herder.engine.request import PromptScored, Request, TokenLogprobs, check_ids
from herder.serve.answers import Part, TokenPlaces
from herder.serve.protocol import CompletionBody
from herder.serve.service import DEFAULT_COMPLETION_TOKENS, Service

_LogprobRow = tuple[int, TokenLogprobs | None, int]
"""Token id, its log-probabilities (None for a prompt's first token), its place in the text."""


def completion_requests(service: Service, body: CompletionBody) -> list[Request]:
    """What the engine is asked for. Raises RequestError or DataError for what cannot be done."""
    params = service.sampling_params(
        body,
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    prompts = [_prompt_ids(service, prompt) for prompt in body.prompt]
    return service.requests(prompts, params, num_choices=body.n or 1, continues_prompt=True)


def _prompt_ids(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return service.tokenizer.encode(prompt, add_special_tokens=True)
    check_ids(prompt, service.engine.limits, parameter="prompt")
    return prompt


class CompletionFormat:
    """text_completion objects."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, service: Service, body: CompletionBody, requests: Sequence[Request]) -> None:
        self._tokenizer = service.tokenizer
        self._wants_logprobs = body.logprobs is not None
        self._requests = requests
        self._echoes = [""] * len(requests)
        if body.echo:
            self._echoes = [
                self._echo(body.prompt[index // (body.n or 1)]) for index in range(len(requests))
            ]
        self._has_begun: set[int] = set()

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """The echo, if any, with the first text; the reason of the end in a last one of its own."""
        text = part.text
        rows = list(self._rows(part))
        if part.prompt is not None:
            text, rows = (
                self._begun(part.index),
                [*self._prompt_rows(part.index, part.prompt), *rows],
            )
        else:
            text = self._begun(part.index) + text
        if text or (rows and part.finish_reason is None):
            yield self._entry(part.index, text, rows)
            rows = []
        if part.finish_reason is not None:
            yield self._entry(part.index, "", rows, last=part)

    def choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        """One whole choice."""
        entries = [entry for part in parts for entry in self.chunks(part)]
        text = "".join(entry["text"] for entry in entries)
        logprobs = (
            _joined([entry["logprobs"] for entry in entries]) if self._wants_logprobs else None
        )
        return {**entries[-1], "text": text, "logprobs": logprobs}

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _begun(self, index: int) -> str:
        """The echo, the first time that a choice has anything to say."""
        if index in self._has_begun:
            return ""
        self._has_begun.add(index)
        return self._echoes[index]

    def _entry(
        self, index: int, text: str, rows: Sequence[_LogprobRow], *, last: Part | None = None
    ) -> dict[str, Any]:
        entry = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(rows) if self._wants_logprobs else None,
            "finish_reason": last.finish_reason if last else None,
        }
        return {**entry, "stop_reason": last.stopped_by} if last else entry

    def _rows(self, part: Part) -> Iterator[_LogprobRow]:
        start = len(self._echoes[part.index])
        for token in part.tokens:
            yield token.logprobs.chosen.token_id, token.logprobs, start + token.text_offset

    def _prompt_rows(self, index: int, prompt: PromptScored) -> Iterator[_LogprobRow]:
        """The prompt's tokens; where its text is not quite its tokens', offsets stay inside it."""
        places = TokenPlaces(self._tokenizer)
        end = len(self._echoes[index])
        for token_id, scored in zip(self._requests[index].prompt_ids, prompt.logprobs, strict=True):
            yield token_id, scored, min(places.next(token_id), end)

    def _logprobs(self, rows: Sequence[_LogprobRow]) -> dict[str, list[Any]]:
        return {
            "tokens": [self._name(token_id) for token_id, _, _ in rows],
            "token_logprobs": [scored.chosen.logprob if scored else None for _, scored, _ in rows],
            "top_logprobs": [
                {self._name(top.token_id): top.logprob for top in reversed(_all(scored))}
                if scored
                else None
                for _, scored, _ in rows
            ],
            "text_offset": [offset for _, _, offset in rows],
        }

    def _name(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def _all(scored: TokenLogprobs) -> list[Any]:
    """The likeliest ones and the chosen one: OpenAI gives up to logprobs + 1."""
    known = {top.token_id for top in scored.top}
    chosen = [] if scored.chosen.token_id in known else [scored.chosen]
    return [*scored.top, *chosen]


def _joined(all_logprobs: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    joined: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for logprobs in all_logprobs:
        for name, values in logprobs.items():
            joined[name] += values
    return joined
