"""/v1/chat/completions: the messages as one prompt, and how its choices are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from herder.engine.request import Logprob, Request, check_request
from herder.errors import RequestError
from herder.serve.answers import Part, ScoredToken
from herder.serve.protocol import ChatBody
from herder.serve.service import Service


def chat_requests(service: Service, body: ChatBody) -> list[Request]:
    """What the engine is asked for. Raises RequestError or DataError for what cannot be done."""
    given = body.max_completion_tokens
    params = service.sampling_params(
        body,
        max_tokens=body.max_tokens if given is None else given,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    prompt_ids = service.chat_ids(body.messages, body.chat_template_kwargs)
    requests = service.requests(
        [prompt_ids], params, num_choices=body.n or 1, continues_prompt=False
    )
    try:
        check_request(requests[0], service.engine.limits)
    except RequestError as error:
        if error.parameter != "max_tokens" or given is None:
            raise
        message = str(error).replace("max_tokens", "max_completion_tokens")
        raise RequestError(message, parameter="max_completion_tokens") from None
    return requests


class ChatFormat:
    """chat.completion and chat.completion.chunk objects."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, service: Service, body: ChatBody) -> None:
        self._tokenizer = service.tokenizer
        self._wants_logprobs = bool(body.logprobs)
        self._has_begun: set[int] = set()

    def chunks(self, part: Part) -> Iterator[dict[str, Any]]:
        """The role before a choice's first text, the reason of its end in a last one of its own."""
        if part.index not in self._has_begun:
            self._has_begun.add(part.index)
            yield self._entry(part.index, {"role": "assistant", "content": ""}, ())
        tokens = part.tokens
        if part.text:
            yield self._entry(part.index, {"content": part.text}, tokens)
            tokens = ()
        if part.finish_reason is not None:
            yield self._entry(part.index, {}, tokens, last=part)

    def choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        """One whole choice."""
        tokens = [token for part in parts for token in part.tokens]
        text = "".join(part.text for part in parts)
        entry = self._entry(index, {}, tokens, last=parts[-1])
        del entry["delta"]
        return {**entry, "message": {"role": "assistant", "content": text}}

    def _entry(
        self,
        index: int,
        delta: dict[str, str],
        tokens: Sequence[ScoredToken],
        *,
        last: Part | None = None,
    ) -> dict[str, Any]:
        logprobs = None
        if self._wants_logprobs and (tokens or last):
            logprobs = {"content": [self._token(token) for token in tokens]}
        entry = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason if last else None,
        }
        return {**entry, "stop_reason": last.stopped_by} if last else entry

    def _token(self, token: ScoredToken) -> dict[str, Any]:
        top = [self._named(logprob) for logprob in token.logprobs.top]
        return {**self._named(token.logprobs.chosen), "top_logprobs": top}

    def _named(self, logprob: Logprob) -> dict[str, Any]:
        name = self._tokenizer.decode([logprob.token_id], skip_special_tokens=False)
        # Half a character has no text of its own, so its bytes are not known from it.
        known = "\N{REPLACEMENT CHARACTER}" not in name
        return {
            "token": name,
            "logprob": logprob.logprob,
            "bytes": list(name.encode()) if known else None,
        }
