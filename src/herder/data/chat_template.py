"""Chat templates: a model's Jinja source, rendered in a sandbox.

A template is code that came with a model: it runs where it can change nothing and reach nothing
but its arguments. The names it may use (raise_exception, strftime_now, tojson, the generation
block) are those that published templates rely on. Source: the chat template chapter of the
transformers manual. Owns rendering to text; what the text's tokens are is the tokenizer's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
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


@lru_cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    # Jinja's own filter escapes HTML, which a model has never seen.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    names = cast("dict[str, Any]", environment.globals)
    names |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


@lru_cache
def _compile(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache
def template_reads(source: str, variable: str) -> bool:
    """Whether a template has a use for a variable; one that does not parse has none."""
    try:
        return variable in meta.find_undeclared_variables(_environment().parse(source))
    except TemplateSyntaxError:
        return False


def render_template(source: str, variables: Mapping[str, Any]) -> str:
    """The chat as text. `variables` are the template's own: messages, tools and so on.

    Raises DataError where the template does not parse or rejects the messages.
    """
    try:
        return _compile(source).render(variables)
    except TemplateSyntaxError as error:
        raise DataError(f"The chat template, line {error.lineno}: {error.message}.") from error
    except Exception as error:  # what a model's own code may raise has no bounds
        reason = str(error) or type(error).__name__
        raise DataError(f"The chat template rejects these messages: {reason}") from error
