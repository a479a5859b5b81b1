"""What clients may send: the bodies of the OpenAI API and of vLLM's additions, typed strictly.

A field that is not known is refused by name; one that is known and cannot be obeyed yet is refused
unless it has the value that asks for nothing; the few that cannot change an answer are named in a
response header. Ranges are the engine's own. Nothing here knows HTTP or tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from herder.engine.request import MaxTokens, NumLogprobs, SamplingFields, TokenId
from herder.serve.body import Body, Json, NoItems, Nothing, unless
from herder.serve.messages import Messages, NamedTool, TemplateVariables, Tool, Tools

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


Prompts: TypeAlias = Annotated[
    list[str] | list[list[int]],
    BeforeValidator(_one_kind_of_prompt, json_schema_input_type=str | list[str] | list[int]),
]


class StreamOptions(Body):
    """What a stream tells besides the text."""

    include_usage: bool = False
    continuous_usage_stats: Annotated[Any, unless(False)] = None
    include_obfuscation: Annotated[Any, unless(False)] = None


class JsonSchema(Body):
    """A named schema; its subset of the language is llguidance's."""

    name: str
    description: str | None = None
    given: dict[str, Json] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool = True
    """Answers follow the schema in any case."""


class ResponseFormat(Body):
    """Which texts an answer may be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_is_read(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "json_schema", "type json_schema needs the key json_schema, and no other type does"
            )
        return self

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """The schema that an answer follows; None: it is free."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.given


class AnswerBody(SamplingFields, Body):
    """What both kinds of completion share."""

    model: str | None = None
    """Absent: the one that is served."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Only requests with the same one share what is cached of their prompts."""

    response_format: ResponseFormat | None = None
    user: Json = None
    metadata: Json = None
    store: Json = None
    service_tier: Json = None
    safety_identifier: Json = None

    @model_validator(mode="after")
    def _options_agree(self) -> AnswerBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "needs stream: true")
        if self.ignore_eos and self.response_format and self.response_format.schema_of_text:
            raise PydanticCustomError(
                "ignore_eos", "JSON has an end, which response_format keeps; leave one of them out"
            )
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
    tools: NoItems = None
    tool_choice: Annotated[Any, unless("none")] = None
    max_tokens: MaxTokens = 16
    """0 only with echo. Source of the default: OpenAI API reference."""
    echo: bool = False
    logprobs: NumLogprobs | None = None
    suffix: Annotated[Any, unless("")] = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _zero_tokens_only_with_echo(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "0 needs echo: true")
        if self.best_of not in (None, self.n):
            raise PydanticCustomError("best_of", "only n is supported yet; leave it out")
        return self


class ChatBody(AnswerBody):
    """POST /v1/chat/completions."""

    messages: Messages
    tools: Tools = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Absent: auto. With none the model is told of no tools."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens. Absent: what the window leaves."""
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """More variables for the template, such as enable_thinking."""
    parallel_tool_calls: bool | None = None
    functions: NoItems = None
    function_call: Annotated[Any, unless("none")] = None
    modalities: Annotated[Any, unless(["text"])] = None
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
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "two functions have one name")
        if isinstance(self.tool_choice, NamedTool) and not self.forced_tools:
            known = ", ".join(names) or "there are none"
            raise PydanticCustomError(
                "tool_choice", "names no function of tools: {known}", {"known": known}
            )
        if self.tool_choice == "required" and not names:
            raise PydanticCustomError("tool_choice", "required needs tools")
        form = self.response_format
        if self.usable_tools and form is not None and form.schema_of_text is not None:
            raise PydanticCustomError(
                "response_format",
                "leaves no room for calls of tools; set tool_choice: none or leave one of them out",
            )

    @property
    def usable_tools(self) -> list[Tool]:
        """Those that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> list[Tool]:
        """Those of which one has to be called; empty: the model is free."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == name]
        return self.tools if self.tool_choice == "required" else []

    @property
    def ignored_fields(self) -> list[str]:
        """Fields that were given and change nothing; forced calls obey parallel_tool_calls."""
        obeyed = {"parallel_tool_calls"} if self.forced_tools else set()
        return [name for name in super().ignored_fields if name not in obeyed]


class TokenizeBody(Body):
    """POST /tokenize: a prompt as /v1/completions would read it, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = Field(default_factory=list)
    """Of a chat."""
    add_special_tokens: bool = True
    """Of a prompt."""
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_text", "give exactly one of prompt and messages")
        if self.tools and self.messages is None:
            raise PydanticCustomError("tools", "needs messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
