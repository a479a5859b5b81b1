"""One answer without a server: a prompt in, text as it comes, figures at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from herder.checkpoint.source import ModelSource
from herder.data.tokenizer import Tokenizer
from herder.engine.request import (
    Event,
    Finished,
    Limits,
    Request,
    SamplingParams,
    TokenMade,
    check_request,
)
from herder.engine.runner import Runner
from herder.serve.load import load_runner, window_tokens


@dataclass(frozen=True)
class OneAnswer:
    """What became of the prompt."""

    text: str
    end: Finished
    tokens_per_second: float | None
    """After the first token; None where there was no second one."""

    def report(self, model: str) -> dict[str, Any]:
        """What `herder generate --json` prints."""
        return {
            "model": model,
            "text": self.text,
            "finish_reason": self.end.reason,
            "prompt_tokens": self.end.num_prompt_tokens,
            "completion_tokens": self.end.num_completion_tokens,
            "tokens_per_second": self.tokens_per_second,
        }

    def figures(self) -> str:
        """The same for people."""
        pace = "" if self.tokens_per_second is None else f", {self.tokens_per_second:.1f} tokens/s"
        end = self.end
        return (
            f"{end.num_prompt_tokens} prompt tokens, {end.num_completion_tokens} new{pace}, "
            f"finish reason {end.reason}"
        )


def prompt_request(
    tokenizer: Tokenizer, prompt: str, params: SamplingParams, *, as_chat: bool
) -> Request:
    """A text to go on with, or a user's message to answer. Raises DataError without a template."""
    if as_chat:
        prompt_ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        return Request(prompt_ids, params, tokenizer.detokenizer())
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=True)
    return Request(prompt_ids, params, tokenizer.detokenizer(context=prompt_ids))


def answer_once(
    source: ModelSource,
    tokenizer: Tokenizer,
    request: Request,
    *,
    precision: str,
    on_text: Callable[[str], None],
) -> OneAnswer:
    """Load the model, answer and let go of it. Raises RequestError before anything is loaded."""
    limits = Limits(window_tokens(source, None), source.architecture.vocab_size)
    check_request(request, limits)
    needed = len(request.prompt_ids) + limits.longest_answer(request)
    runner = load_runner(source, tokenizer, precision=precision, window_tokens=needed)
    text, token_seconds = "", []
    for event in _events(runner, request):
        if isinstance(event, TokenMade):
            token_seconds.append(time.monotonic())
        if isinstance(event, TokenMade | Finished):
            text += event.text
            on_text(event.text)
        if isinstance(event, Finished):
            num_after_first = len(token_seconds) - 1
            seconds = token_seconds[-1] - token_seconds[0] if num_after_first > 0 else None
            return OneAnswer(text, event, num_after_first / seconds if seconds else None)
    raise AssertionError("a request always has an end")


def _events(runner: Runner, request: Request) -> Iterator[Event]:
    with runner.serving():
        sequence = runner.begin(request)
        while True:
            yield from runner.step(sequence)
