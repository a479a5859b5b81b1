"""One served model: its name, tokenizer, engine and metrics, and what a body asks of the engine.

Owns the translation from fields to sampling parameters and prompts. It knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from herder.data.tokenizer import Tokenizer
from herder.engine.engine import Engine
from herder.engine.request import Request, SamplingFields, SamplingParams
from herder.errors import RequestError
from herder.serve.errors import ApiError
from herder.serve.grammar import Constraint, Grammars
from herder.serve.messages import Message, Tool
from herder.serve.metrics import ServingMetrics
from herder.serve.protocol import MAX_CHOICES, AnswerBody
from herder.serve.tools import form_of

_RESERVED_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt"}


@dataclass(frozen=True)
class Service:
    """What the endpoints answer with."""

    name: str
    tokenizer: Tokenizer
    engine: Engine
    defaults: Mapping[str, Any]
    """Sampling fields that the model's authors recommend, where a request leaves them out."""
    metrics: ServingMetrics
    grammars: Grammars
    cache_bytes: int
    """Of the KV cache, allocated."""
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, asked: str | None) -> None:
        """Raise 404 where another model is asked for."""
        if asked not in (None, self.name):
            message = f"model: {asked!r} is not served here; {self.name!r} is"
            raise ApiError(404, message, parameter="model", code="model_not_found")

    def chat_ids(
        self, messages: Sequence[Message], variables: Mapping[str, Any], tools: Sequence[Tool] = ()
    ) -> list[int]:
        """The prompt of a chat. Raises DataError where there is no template or it rejects them."""
        if tools or any(message.is_about_tools for message in messages):
            form_of(self.tokenizer)
        if taken := _RESERVED_VARIABLES & variables.keys():
            raise RequestError(
                f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be given here",
                parameter="chat_template_kwargs",
            )
        inputs = [message.as_template_input() for message in messages]
        told = [tool.model_dump(exclude_unset=True) for tool in tools]
        return self.tokenizer.encode_chat(inputs, **variables, tools=told or None)

    def requests(
        self,
        body: AnswerBody,
        prompts: Sequence[Sequence[int]],
        *,
        continues_prompt: bool,
        constraint: Constraint | None = None,
        shown: frozenset[int] = frozenset(),
        **others: Any,
    ) -> list[Request]:
        """One request a choice, a prompt's choices side by side; each has a seed of its own.

        `continues_prompt`: the text goes on where the prompt's ends, its first space included.
        `constraint`: what each answer follows instead of the body's response_format.
        `shown`: control tokens that have a text in the answers.
        `others`: sampling parameters whose form differs between bodies.
        """
        num_all = len(prompts) * body.n
        most = min(MAX_CHOICES, self.engine.max_queued_requests)
        if num_all > most:
            raise RequestError(
                f"n: {len(prompts)} prompts with n={body.n} make {num_all} answers; "
                f"at most {most} are made at once",
                parameter="n",
            )
        params = self._sampling_params(body, others)
        schema = None if body.response_format is None else body.response_format.schema_of_text
        if constraint is None and schema is not None:
            constraint = self.grammars.of_schema(schema)
        return [
            Request(
                ids,
                _with_seed_of(params, choice),
                self.tokenizer.detokenizer(context=ids if continues_prompt else (), shown=shown),
                None if constraint is None else constraint.copy(),
                body.cache_salt,
            )
            for ids in prompts
            for choice in range(body.n)
        ]

    def _sampling_params(self, body: AnswerBody, others: Mapping[str, Any]) -> SamplingParams:
        """What the body gives, else what the model's authors recommend."""
        given = SamplingFields.model_fields.keys() & body.model_fields_set
        fields = {**self.defaults, **{name: getattr(body, name) for name in given}, **others}
        ends = (*body.stop_token_ids, *self._control_tokens(body))
        return SamplingParams(**{**fields, "stop_token_ids": ends})

    def _control_tokens(self, body: AnswerBody) -> list[int]:
        """Stop strings that are one control token: their text is never shown, so match the id."""
        ends = []
        for stop in body.stop:
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
