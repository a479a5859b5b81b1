"""What clients may send: the bodies of the OpenAI API and of vLLM's additions, typed strictly.

A field that is not known is refused by name; one that is known and cannot be obeyed yet is refused
unless it has the value that asks for nothing; the few that cannot change an answer are named in a
response header. Ranges are the engine's own. Nothing here knows HTTP or tokens.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from herder.config.record import Record
from herder.engine.request import MaxTokens, NumLogprobs, SamplingFields, TokenId

MAX_CHOICES = 128
"""Answers to one HTTP request, n times the prompts. Source: OpenAI API reference, n."""
IGNORED_FIELDS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "parallel_tool_calls",
)
"""What cannot change an answer: the provider's own books, and how tools would be called."""


def _unless(neutral: Any = None) -> BeforeValidator:
    """Refuse every value of a known field, apart from the one that asks for nothing."""

    def refuse(value: Any) -> Any:
        if type(value) is not type(neutral) or value != neutral:
            raise PydanticCustomError(
                "unsupported", "this field is not supported yet; leave it out"
            )
        return value

    return BeforeValidator(refuse)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token_id) is int for token_id in value)


def _one_kind_of_prompt(value: Any) -> Any:
    """A prompt in any of its four forms as a list of prompts; one message where it is none."""
    prompts = [value] if isinstance(value, str) or _are_ids(value) else value
    if isinstance(prompts, list) and (
        all(isinstance(each, str) for each in prompts) or all(map(_are_ids, prompts))
    ):
        return prompts
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, a list of token ids or a list of such lists"
    )


def _finite(value: JsonValue) -> JsonValue:
    """Python's reader lets NaN and Infinity pass, which are no JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite", "holds a number that is not finite") from None
    return value


Json: TypeAlias = Annotated[JsonValue, AfterValidator(_finite)]
Prompts: TypeAlias = Annotated[
    list[str] | list[list[int]],
    BeforeValidator(_one_kind_of_prompt, json_schema_input_type=str | list[str] | list[int]),
]
Nothing: TypeAlias = Annotated[Any, _unless()]
NoItems: TypeAlias = Annotated[Any, _unless([])]


class Body(Record):
    """What a client sends; null is the same as absent.

    Its validator is built at once: FastAPI takes it when a route is declared.
    """

    model_config = ConfigDict(defer_build=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cls.model_fields
        return {
            name: each for name, each in value.items() if each is not None or name not in fields
        }


class StreamOptions(Body):
    """What a stream tells besides the text."""

    include_usage: bool = False
    continuous_usage_stats: Annotated[Any, _unless(False)] = None
    include_obfuscation: Annotated[Any, _unless(False)] = None


class AnswerBody(SamplingFields, Body):
    """What both kinds of completion share."""

    model: str | None = None
    """Absent: the one that is served."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Only requests with the same one share what is cached of their prompts."""

    response_format: Annotated[Any, _unless({"type": "text"})] = None
    tools: NoItems = None
    tool_choice: Annotated[Any, _unless("none")] = None

    user: Json = None
    metadata: Json = None
    store: Json = None
    service_tier: Json = None
    safety_identifier: Json = None

    @model_validator(mode="after")
    def _options_of_a_stream_only(self) -> AnswerBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "needs stream: true")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def ignored_fields(self) -> list[str]:
        """Fields that were given and change nothing."""
        return [name for name in IGNORED_FIELDS if name in self.model_fields_set]


class CompletionBody(AnswerBody):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: MaxTokens = 16
    """0 only with echo. Source of the default: OpenAI API reference."""
    echo: bool = False
    logprobs: NumLogprobs | None = None
    suffix: Annotated[Any, _unless("")] = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _zero_tokens_only_with_echo(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "0 needs echo: true")
        if self.best_of not in (None, self.n):
            raise PydanticCustomError("best_of", "only n is supported yet; leave it out")
        return self


class ContentPart(Body):
    """One part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None
    tool_calls: NoItems = None
    function_call: Nothing = None
    refusal: Nothing = None
    audio: Nothing = None
    annotations: NoItems = None

    def as_template_input(self) -> dict[str, str]:
        """What a chat template reads: parts joined by line ends."""
        parts = self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


Messages: TypeAlias = Annotated[list[Message], Field(min_length=1)]
TemplateVariables: TypeAlias = dict[str, Json]


class ChatBody(AnswerBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens. Absent: what the window leaves."""
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """More variables for the template, such as enable_thinking."""
    parallel_tool_calls: bool | None = None
    functions: NoItems = None
    function_call: Annotated[Any, _unless("none")] = None
    modalities: Annotated[Any, _unless(["text"])] = None
    audio: Nothing = None
    prediction: Nothing = None
    reasoning_effort: Nothing = None
    verbosity: Nothing = None
    web_search_options: Nothing = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise PydanticCustomError(
                "max_tokens", "differs from max_completion_tokens; give one of them"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "needs logprobs: true")
        return self


class TokenizeBody(Body):
    """POST /tokenize: a prompt as /v1/completions would read it, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    """Of a prompt."""
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_text", "give exactly one of prompt and messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
