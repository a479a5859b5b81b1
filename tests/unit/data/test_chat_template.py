"""Chat templates run in a sandbox, with the names that published ones use."""

from __future__ import annotations

import re

import pytest

from herder.data.chat_template import render_template
from herder.errors import DataError

MESSAGES = [{"role": "user", "content": "a<b 今"}]


def render(source: str) -> str:
    given = {"messages": MESSAGES, "add_generation_prompt": True, "bos_token": "<s>"}
    return render_template(source, given)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ missing }}", "<s>a<b 今"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a<b 今"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% if true %}\n  x\n{% endif %}", "  x\n"),
        ("{% if not tools and add_generation_prompt %}yes{% endif %}", "yes"),
    ],
)
def test_what_published_templates_use_works(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_template_may_ask_for_the_date() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "rejects these messages"),
        ("{{ messages.append(1) }}", "rejects these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "rejects these messages"),
        ("{{ cycler.__init__.__globals__.os.popen('true') }}", "rejects these messages"),
    ],
)
def test_what_a_template_may_not_do_is_an_error(source: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        render(source)


def test_a_template_that_does_not_parse_is_refused_by_line() -> None:
    with pytest.raises(DataError, match="line 2"):
        render("x\n{% if %}")
