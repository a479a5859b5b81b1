"""/v1/chat/completions: the messages as one prompt, and how its choices are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from herder.engine.request import Event, Logprob, Request, TokenLogprobs, TokenMade, check_request
from herder.errors import RequestError
from herder.serve.formats import Entry, Format
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
    requests = service.requests([prompt_ids], params, num_choices=body.n, continues_prompt=False)
    try:
        check_request(requests[0], service.engine.limits)
    except RequestError as error:
        if error.parameter != "max_tokens" or given is None:
            raise
        message = str(error).replace("max_tokens", "max_completion_tokens")
        raise RequestError(message, parameter="max_completion_tokens") from None
    return requests


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk objects."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def opening(self, index: int, first: Event) -> Iterator[Entry]:
        """The role."""
        yield {**self._entry(index, "", ()), "delta": {"role": "assistant", "content": ""}}

    def part(self, text: str) -> dict[str, Any]:
        """A delta."""
        return {"delta": {"content": text} if text else {}}

    def whole(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """A message."""
        text = "".join(entry["delta"].get("content", "") for entry in entries)
        return {"message": {"role": "assistant", "content": text}}

    def rows(self, index: int, made: TokenMade) -> Iterable[TokenLogprobs]:
        """The log-probabilities themselves."""
        return [made.logprobs] if made.logprobs else []

    def logprobs(self, rows: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """One object a token."""
        return {
            "content": [
                {**self._named(row.chosen), "top_logprobs": [self._named(top) for top in row.top]}
                for row in rows
            ]
        }

    def _named(self, logprob: Logprob) -> dict[str, Any]:
        name = self.token(logprob.token_id)
        # Half a character has no text of its own, so its bytes are not known from it.
        known = "\N{REPLACEMENT CHARACTER}" not in name
        return {
            "token": name,
            "logprob": logprob.logprob,
            "bytes": list(name.encode()) if known else None,
        }
