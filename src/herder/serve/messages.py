"""What a chat consists of: messages, tools that may be called, calls that were made.

Owns their fields and the form in which chat templates read them. Nothing here knows HTTP.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from herder.serve.body import Body, Json, NoItems, Nothing


class ContentPart(Body):
    """One part of a message."""

    type: Literal["text"]
    text: str


Name: TypeAlias = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
"""Of a function. Source of the pattern: OpenAI API reference."""


class Function(Body):
    """What a model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Json] | None = None
    """A JSON schema of the arguments; absent: there are none."""
    strict: bool = False
    """Calls that tool_choice forces follow their schema in any case, others never surely."""

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """What a call's arguments follow: an object."""
        return {"additionalProperties": False, **(self.parameters or {}), "type": "object"}


class Tool(Body):
    """A function, as OpenAI wraps it."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """A function that is called, by name."""

    name: str


class NamedTool(Body):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    """A call that was made: arguments are the text of a JSON object."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, text: str) -> str:
        try:
            if isinstance(json.loads(text or "{}"), dict):
                return text
        except (ValueError, RecursionError):
            pass
        raise PydanticCustomError("arguments", "must be the text of a JSON object")


class ToolCall(Body):
    """One call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def as_template_input(self) -> dict[str, Any]:
        """What a chat template reads: arguments as an object."""
        arguments = json.loads(self.function.arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool: the call that it answers."""
    function_call: Nothing = None
    refusal: Nothing = None
    audio: Nothing = None
    annotations: NoItems = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("content", "content: required, but absent")
        for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, field) and self.role != role:
                raise PydanticCustomError(
                    "role", "{field} is of role {role} alone", {"field": field, "role": role}
                )
        return self

    @property
    def is_about_tools(self) -> bool:
        """Whether only a template that knows tools can write it."""
        return self.role == "tool" or bool(self.tool_calls)

    def as_template_input(self) -> dict[str, Any]:
        """What a chat template reads: parts joined by line ends."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        calls = [call.as_template_input() for call in self.tool_calls]
        read = {"role": self.role, "content": text, **({"tool_calls": calls} if calls else {})}
        return read | {key: name for key, name in named.items() if name is not None}


Tools: TypeAlias = list[Tool]
Messages: TypeAlias = Annotated[list[Message], Field(min_length=1)]
TemplateVariables: TypeAlias = dict[str, Json]
