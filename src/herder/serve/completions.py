"""/v1/completions: the body's prompts as requests, and how its choices are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from herder.data.tokenizer import Tokenizer
from herder.engine.request import Event, PromptScored, Request, TokenLogprobs, TokenMade, check_ids
from herder.serve.formats import Entry, Format
from herder.serve.protocol import CompletionBody
from herder.serve.service import Service

_Row = tuple[int, TokenLogprobs | None, int]
"""Token id, its log-probabilities (None for a prompt's first token), its place in the text."""


def completion_requests(service: Service, body: CompletionBody) -> list[Request]:
    """What the engine is asked for. Raises RequestError or DataError for what cannot be done."""
    params = service.sampling_params(
        body,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    prompts = [_prompt_ids(service, prompt) for prompt in body.prompt]
    return service.requests(prompts, params, num_choices=body.n, continues_prompt=True)


def _prompt_ids(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return service.tokenizer.encode(prompt, add_special_tokens=True)
    check_ids(prompt, service.engine.limits, parameter="prompt")
    return prompt


class _Places:
    """Where in a text its tokens stand, in characters, told one after the other."""

    def __init__(self, tokenizer: Tokenizer, *, start: int, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.detokenizer(context=context)
        self._length = start

    def next(self, token_id: int) -> int:
        start = self._length
        text = self._decoder.add(token_id)
        self._length += len(text)
        # A token may also bring out the halves of characters that were held before it.
        own = self._tokenizer.decode([token_id])
        return self._length - len(own) if own and text.endswith(own) else start


class CompletionFormat(Format):
    """text_completion objects."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, service: Service, body: CompletionBody, requests: Sequence[Request]) -> None:
        tokenizer = service.tokenizer
        super().__init__(tokenizer, wants_logprobs=body.logprobs is not None)
        self._prompts = [request.prompt_ids for request in requests]
        texts = [each if isinstance(each, str) else tokenizer.decode(each) for each in body.prompt]
        self._echoes = [text if body.echo else "" for text in texts for _ in range(body.n)]
        self._places = [
            _Places(tokenizer, start=len(echo), context=prompt_ids)
            for echo, prompt_ids in zip(self._echoes, self._prompts, strict=True)
        ]

    def opening(self, index: int, first: Event) -> Iterator[Entry]:
        """The echo, if any."""
        if echo := self._echoes[index]:
            rows = self._prompt_rows(index, first) if isinstance(first, PromptScored) else ()
            yield self._entry(index, echo, rows)

    def part(self, text: str) -> dict[str, Any]:
        """Plain text."""
        return {"text": text}

    def whole(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Plain text."""
        return {"text": "".join(entry["text"] for entry in entries)}

    def rows(self, index: int, made: TokenMade) -> Iterable[_Row]:
        """With the token's place."""
        if made.logprobs is not None:
            yield made.token_id, made.logprobs, self._places[index].next(made.token_id)

    def _prompt_rows(self, index: int, prompt: PromptScored) -> Iterator[_Row]:
        """The prompt's tokens; where its text is not quite its tokens', offsets stay inside it."""
        places = _Places(self._tokenizer, start=0, context=())
        end = len(self._echoes[index])
        for token_id, scored in zip(self._prompts[index], prompt.logprobs, strict=True):
            yield token_id, scored, min(places.next(token_id), end)

    def logprobs(self, rows: Sequence[_Row]) -> dict[str, list[Any]]:
        """Lists side by side, one item a token."""
        return {
            "tokens": [self.token(token_id) for token_id, _, _ in rows],
            "token_logprobs": [scored.chosen.logprob if scored else None for _, scored, _ in rows],
            "top_logprobs": [self._alternatives(scored) for _, scored, _ in rows],
            "text_offset": [offset for _, _, offset in rows],
        }

    def _alternatives(self, scored: TokenLogprobs | None) -> dict[str, float] | None:
        """The likeliest ones and the chosen one, up to logprobs + 1 as OpenAI gives them.

        Of two tokens with one text the likelier stays.
        """
        if scored is None:
            return None
        best_last = [scored.chosen, *reversed(scored.top)]
        return {self.token(each.token_id): each.logprob for each in best_last}
