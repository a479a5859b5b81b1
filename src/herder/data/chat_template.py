"""Chat templates: a model's Jinja source, rendered in a sandbox.

A template is code that came with a model: it runs where it can change nothing and reach nothing
but its arguments. The names it may use (raise_exception, strftime_now, tojson, the generation
block) are those that published templates rely on. Source: the chat template chapter of the
transformers manual. Owns rendering to text; what the text's tokens are is the tokenizer's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from herder.errors import DataError


class _GenerationBlock(Extension):
    """{% generation %} marks what the assistant says; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 (the attribute that Jinja defines)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a model has never seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    names = cast("dict[str, Any]", environment.globals)
    names |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def compile_template(source: str) -> Callable[..., str]:
    """A function of messages, tools and a template's other variables that returns the chat as text.

    Raises DataError where the template does not parse; the function raises it where the template
    rejects the messages.
    """
    try:
        template = _environment().from_string(source)
    except TemplateSyntaxError as error:
        raise DataError(f"The chat template, line {error.lineno}: {error.message}.") from error

    def render(
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str:
        try:
            return template.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as error:  # what a model's own code may raise has no bounds
            reason = str(error) or type(error).__name__
            raise DataError(f"The chat template rejects these messages: {reason}") from error

    return render
