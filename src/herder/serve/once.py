"""One answer without a server: a prompt in, text as it comes, figures at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from herder.checkpoint.source import ModelSource
from herder.config.quantization import WeightQuantization
from herder.config.run import EngineConfig
from herder.data.tokenizer import Tokenizer
from herder.engine.engine import Engine
from herder.engine.request import (
    Finished,
    Limits,
    Request,
    SamplingParams,
    TokenMade,
    check_request,
)
from herder.serve.load import load_runner, window_tokens


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
    quantization: WeightQuantization | None,
    on_text: Callable[[str], None],
) -> dict[str, Any]:
    """Load the model, answer and let go of it: what `herder generate --json` prints.

    tokens_per_second counts from the first token on; None where there was no second one. Raises
    RequestError before anything is loaded.
    """
    limits = Limits(window_tokens(source, None), source.architecture.vocab_size)
    check_request(request, limits)
    needed = len(request.prompt_ids) + limits.longest_answer(request)
    runner = load_runner(
        source,
        tokenizer,
        precision=precision,
        quantization=quantization,
        window_tokens=needed,
        config=EngineConfig(max_num_seqs=1, prefix_caching=False),
    )
    text, token_seconds = "", []
    with Engine(runner) as engine:
        for event in engine.answer(request):
            if isinstance(event, TokenMade):
                token_seconds.append(time.monotonic())
            if isinstance(event, TokenMade | Finished):
                text += event.text
                on_text(event.text)
    assert isinstance(event, Finished), "a request always has an end"
    if event.error is not None:
        raise event.error
    seconds = token_seconds[-1] - token_seconds[0] if token_seconds else 0
    return {
        "model": source.name,
        "text": text,
        "finish_reason": event.reason,
        "prompt_tokens": event.num_prompt_tokens,
        "completion_tokens": event.num_completion_tokens,
        "tokens_per_second": (len(token_seconds) - 1) / seconds if seconds else None,
    }
