"""One served model: its name, tokenizer, engine and metrics, and what a body asks of the engine.

Owns the translation from fields to sampling parameters and prompts. It knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from herder.config.record import Record
from herder.data.tokenizer import Tokenizer
from herder.engine.engine import Engine
from herder.engine.request import (
    MinP,
    RepetitionPenalty,
    Request,
    SamplingParams,
    Temperature,
    TopK,
    TopP,
)
from herder.errors import RequestError
from herder.serve.errors import model_not_found
from herder.serve.metrics import ServingMetrics
from herder.serve.protocol import MAX_CHOICES, Message, SamplingFields

DEFAULT_COMPLETION_TOKENS = 16
"""Of /v1/completions. Source: OpenAI API reference, max_tokens."""
_SAME_NAMES = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "include_stop_str_in_output",
    "ignore_eos",
)


class SamplingDefaults(Record):
    """What the model's authors recommend, for fields that a request leaves out."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that are recommended."""
        return {name: value for name, value in self if value is not None}


@dataclass(frozen=True)
class Service:
    """What the endpoints answer with."""

    name: str
    tokenizer: Tokenizer
    engine: Engine
    defaults: SamplingDefaults
    metrics: ServingMetrics
    cache_bytes: int
    """Of the KV cache, allocated."""
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, asked: str | None) -> None:
        """Raise 404 where another model is asked for."""
        if asked is not None and asked != self.name:
            raise model_not_found(asked, self.name)

    def chat_ids(
        self, messages: Sequence[Message], variables: dict[str, Any] | None = None
    ) -> list[int]:
        """The prompt of a chat. Raises DataError where there is no template or it rejects them."""
        reserved = {"messages", "tools", "documents", "add_generation_prompt"}
        taken = reserved & set(variables or {})
        if taken:
            raise RequestError(
                f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be given here",
                parameter="chat_template_kwargs",
            )
        inputs = [message.as_template_input() for message in messages]
        return self.tokenizer.encode_chat(inputs, **(variables or {}))

    def sampling_params(self, body: SamplingFields, **others: Any) -> SamplingParams:
        """The engine's parameters for a body; `others` are the fields whose form differs."""
        given = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
        ends = [*(body.stop_token_ids or ()), *self._control_tokens(body)]
        return SamplingParams(
            **{**self.defaults.given, **given, **others},
            stop=body.stop_strings,
            stop_token_ids=tuple(ends),
            logit_bias=tuple((body.logit_bias or {}).items()),
        )

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        num_choices: int,
        continues_prompt: bool,
    ) -> list[Request]:
        """One request a choice, a prompt's choices side by side; each has a seed of its own.

        `continues_prompt`: the text goes on where the prompt's ends, its first space included.
        """
        num_all = len(prompts) * num_choices
        most = min(MAX_CHOICES, self.engine.max_queued_requests)
        if num_all > most:
            raise RequestError(
                f"n: {len(prompts)} prompts with n={num_choices} make {num_all} answers; "
                f"at most {most} are made at once",
                parameter="n",
            )
        return [
            Request(
                ids,
                _with_seed_of(params, choice),
                self.tokenizer.detokenizer(context=ids if continues_prompt else ()),
            )
            for ids in prompts
            for choice in range(num_choices)
        ]

    def _control_tokens(self, body: SamplingFields) -> list[int]:
        """Stop strings that are one control token: their text is never shown, so match the id."""
        ends = []
        for stop in body.stop_strings:
            ids = self.tokenizer.encode(stop, add_special_tokens=False)
            if len(ids) == 1 and ids[0] in self.tokenizer.special_token_ids:
                if body.include_stop_str_in_output:
                    raise RequestError(
                        f"stop: {stop!r} is a control token, which has no text to include; "
                        "leave out include_stop_str_in_output",
                        parameter="stop",
                    )
                ends.append(ids[0])
        return ends


def _with_seed_of(params: SamplingParams, choice: int) -> SamplingParams:
    """The n answers of one seed differ, and each is the same every time."""
    if params.seed is None or choice == 0:
        return params
    seed = (params.seed + choice + 2**63) % 2**64 - 2**63
    return params.model_copy(update={"seed": seed})
