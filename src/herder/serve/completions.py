"""The two kinds of completion: what a body asks of the engine, and how its choices are written.

A stream and a whole answer are made of the same entries, so that they cannot differ. Nothing here
knows HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from herder.data.tokenizer import Tokenizer
from herder.engine.request import (
    Event,
    Finished,
    Logprob,
    PromptScored,
    Request,
    TokenLogprobs,
    TokenMade,
    check_ids,
    check_request,
)
from herder.errors import RequestError
from herder.serve.protocol import ChatBody, CompletionBody
from herder.serve.service import Service
from herder.serve.tools import CallReader, form_of, shown_marks

Entry = dict[str, Any]
"""What a choice gains: an item of a chunk's `choices`, with its text as `text`."""


def chat_requests(service: Service, body: ChatBody) -> list[Request]:
    """What the engine is asked for. Raises RequestError or DataError for what cannot be done."""
    given, tokenizer = body.max_completion_tokens, service.tokenizer
    constraint, shown = None, frozenset[int]()
    if body.usable_tools:
        form = form_of(tokenizer)
        shown = shown_marks(tokenizer, form)
        only_one = body.parallel_tool_calls is False
        if body.forced_tools:
            lark = form.lark(tokenizer, body.forced_tools, only_one=only_one)
            constraint = service.grammars.of_calls(lark)
    requests = service.requests(
        body,
        [service.chat_ids(body.messages, body.chat_template_kwargs, body.usable_tools)],
        continues_prompt=False,
        constraint=constraint,
        shown=shown,
        max_tokens=body.max_tokens if given is None else given,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    try:
        check_request(requests[0], service.engine.limits)
    except RequestError as error:
        if error.parameter != "max_tokens" or given is None:
            raise
        message = str(error).replace("max_tokens", "max_completion_tokens")
        raise RequestError(message, parameter="max_completion_tokens") from None
    return requests


def completion_requests(service: Service, body: CompletionBody) -> list[Request]:
    """What the engine is asked for. Raises RequestError or DataError for what cannot be done."""
    return service.requests(
        body,
        [_prompt_ids(service, prompt) for prompt in body.prompt],
        continues_prompt=True,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def _prompt_ids(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return service.tokenizer.encode(prompt, add_special_tokens=True)
    check_ids(prompt, service.engine.limits, parameter="prompt")
    return prompt


class Format(ABC):
    """Turns the events of choices into entries of chunks, and these into whole choices."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, tokenizer: Tokenizer, *, wants_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._has_begun: set[int] = set()

    def entries(self, index: int, event: Event) -> Iterator[Entry]:
        """What an event of a choice adds; the reason of the end is in a last entry of its own."""
        if index not in self._has_begun:
            self._has_begun.add(index)
            yield from self.opening(index, event)
        match event:
            case TokenMade() if event.text or event.logprobs:
                yield self._entry(index, event.text, [event.logprobs] if event.logprobs else [])
            case Finished():
                if event.text:
                    yield self._entry(index, event.text)
                ending = {"finish_reason": event.reason, "stop_reason": event.stopped_by}
                yield {**self._entry(index, ""), **ending}

    def choice(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """One whole choice made of its entries."""
        logprobs = None
        if self._wants_logprobs:
            parts = [entry["logprobs"] for entry in entries]
            logprobs = {name: [row for part in parts for row in part[name]] for name in parts[-1]}
        text = "".join(entry["text"] for entry in entries)
        return self.shaped({**entries[-1], "text": text, "logprobs": logprobs}, name="message")

    def _entry(self, index: int, text: str, scored: Sequence[TokenLogprobs | None] = ()) -> Entry:
        logprobs = self.logprobs(index, scored) if self._wants_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def token(self, token_id: int) -> str:
        """A token's own text, by which clients know it."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    @abstractmethod
    def opening(self, index: int, first: Event) -> Iterator[Entry]:
        """What comes before a choice's first text."""

    def shaped(self, entry: Entry, *, name: str = "delta") -> dict[str, Any]:
        """An entry or a whole choice as it is written; `name` is where a chat has its text."""
        return entry

    @abstractmethod
    def logprobs(self, index: int, scored: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """A choice's next tokens as lists, which are joined name by name. None: not scored."""


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk objects."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def opening(self, index: int, first: Event) -> Iterator[Entry]:
        """The role."""
        yield {**self._entry(index, ""), "role": "assistant"}

    def shaped(self, entry: Entry, *, name: str = "delta") -> dict[str, Any]:
        """Role and text in an object of their own."""
        rest = dict(entry)
        text, role = rest.pop("text"), rest.pop("role", None)
        calls = {"tool_calls": given} if (given := rest.pop("tool_calls", None)) else {}
        if role or name == "message":
            content = None if calls and not text else text
            return {**rest, name: {"role": "assistant", "content": content, **calls}}
        return {**rest, name: {**({"content": text} if text else {}), **calls}}

    def logprobs(self, index: int, scored: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """One object a token."""
        return {
            "content": [
                {**self._named(each.chosen), "top_logprobs": [*map(self._named, each.top)]}
                for each in scored
                if each is not None
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


class ToolChatFormat(ChatFormat):
    """A chat whose answers may call tools: calls are taken out of the text."""

    def __init__(self, tokenizer: Tokenizer, body: ChatBody) -> None:
        super().__init__(tokenizer, wants_logprobs=body.logprobs)
        form, names = form_of(tokenizer), [tool.function.name for tool in body.usable_tools]
        self._readers = [CallReader(form, names) for _ in range(body.n)]

    def entries(self, index: int, event: Event) -> Iterator[Entry]:
        """As for any chat, with calls in entries' `tool_calls`; a last one tells of them."""
        reader = self._readers[index]
        for entry in super().entries(index, event):
            if entry["finish_reason"] is None:
                text, calls = reader.add(entry["text"])
                if text or calls or entry["logprobs"] or "role" in entry:
                    yield {**entry, "text": text, "tool_calls": calls}
                continue
            text, calls = reader.finish()
            if text or calls:
                yield {**self._entry(index, text), "tool_calls": calls}
            calls_tools = entry["finish_reason"] == "stop" and reader.num_calls
            yield {**entry, "finish_reason": "tool_calls"} if calls_tools else entry

    def choice(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """One whole choice; each call is joined from its parts."""
        calls: list[dict[str, Any]] = []
        for delta in (delta for entry in entries for delta in entry.get("tool_calls", ())):
            if delta["index"] == len(calls):
                calls.append({key: value for key, value in delta.items() if key != "index"})
            else:
                function = calls[delta["index"]]["function"]
                arguments = function["arguments"] + delta["function"]["arguments"]
                calls[delta["index"]]["function"] = {**function, "arguments": arguments}
        return super().choice([*entries[:-1], {**entries[-1], "tool_calls": calls}])


class _Places:
    """Where in a text its tokens stand, in characters, told one after the other."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.detokenizer(context=context)
        self.length = 0

    def next(self, token_id: int) -> int:
        start = self.length
        text = self._decoder.add(token_id)
        self.length += len(text)
        # A token may also bring out the halves of characters that were held before it.
        own = self._tokenizer.decode([token_id])
        return self.length - len(own) if own and text.endswith(own) else start


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
            _Places(tokenizer, context=() if body.echo else prompt_ids)
            for prompt_ids in self._prompts
        ]

    def opening(self, index: int, first: Event) -> Iterator[Entry]:
        """The echo, if any; where it is not quite its tokens' text, offsets stay inside it."""
        if echo := self._echoes[index]:
            scored = first.logprobs if isinstance(first, PromptScored) else ()
            entry = self._entry(index, echo, scored)
            if entry["logprobs"]:
                offsets = entry["logprobs"]["text_offset"]
                entry["logprobs"]["text_offset"] = [min(each, len(echo)) for each in offsets]
            self._places[index].length = len(echo)
            yield entry

    def logprobs(self, index: int, scored: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Lists side by side, one item a token; only a prompt's first one is not scored."""
        first_id = self._prompts[index][0]
        ids = [each.chosen.token_id if each else first_id for each in scored]
        return {
            "tokens": [self.token(token_id) for token_id in ids],
            "token_logprobs": [each.chosen.logprob if each else None for each in scored],
            "top_logprobs": [self._alternatives(each) for each in scored],
            "text_offset": [self._places[index].next(token_id) for token_id in ids],
        }

    def _alternatives(self, scored: TokenLogprobs | None) -> dict[str, float] | None:
        """The likeliest ones and the chosen one, up to logprobs + 1 as OpenAI gives them.

        Of two tokens with one text the likelier stays.
        """
        if scored is None:
            return None
        best_last = [scored.chosen, *reversed(scored.top)]
        return {self.token(each.token_id): each.logprob for each in best_last}
