"""The same ids and the same chats as transformers makes from the same files."""

from __future__ import annotations

import random
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend

from herder.data.tokenizer import Tokenizer

CHATML = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{%- endif %}"
    "{% for message in messages %}<|im_start|>"
    "{{ message['role'] + '\n' + message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% set ns = namespace(last='assistant') %}"
    "{% for message in messages %}{% if message.role == ns.last %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.last = message.role %}"
    "{% generation %}[{{ message.role | upper }}] {{ message.content }}{% endgeneration %}"
    "{{ eos_token if message.role == 'assistant' }}{% endfor %}"
)
CHATS = [
    [{"role": "user", "content": "How is the weather today? "}],
    [
        {"role": "user", "content": "今天天气如何"},
        {"role": "assistant", "content": "\U0001f600 fine\n"},
        {"role": "user", "content": " <b>ok</b> & 'so'"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "<now> 今"}}]
SETTINGS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}


def both(stored: str, template: str, **settings: Any) -> tuple[Any, Any]:
    ours = Tokenizer(stored, settings={**SETTINGS, **settings}, chat_template=template)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(stored), chat_template=template, **SETTINGS, **settings
    )
    return ours, theirs


@pytest.mark.parametrize("template", [CHATML, ALTERNATING])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("opens", [True, False])
def test_chats_have_the_same_ids(
    small_tokenizer_json: str, template: str, chat: list[Any], tools: list[Any] | None, opens: bool
) -> None:
    ours, theirs = both(small_tokenizer_json, template)
    options = {"add_generation_prompt": opens, "tools": tools}
    rendered = theirs.apply_chat_template(chat, tokenize=False, **options)
    ids = theirs.apply_chat_template(chat, return_dict=False, **options)
    assert ours.render_chat(chat, **options) == rendered
    assert ours.encode_chat(chat, **options) == ids


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("adds_eos", [True, False])
def test_texts_have_the_same_ids(small_tokenizer_json: str, adds_bos: bool, adds_eos: bool) -> None:
    ours, theirs = both(
        small_tokenizer_json, CHATML, add_bos_token=adds_bos, add_eos_token=adds_eos
    )
    generator = random.Random(0)
    alphabet = [" ", "\n", "a", "The fox", "今", "\U0001f600", "\u0301", "<|im_end|>", "</s>"]
    for _ in range(50):
        text = "x" + "".join(generator.choices(alphabet, k=20))
        for special in (True, False):
            expected = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == expected
            for skip in (True, False):
                decoded = theirs.decode(expected, skip_special_tokens=skip)
                assert ours.decode(expected, skip_special_tokens=skip) == decoded
