"""Calls of tools, from the request's fields over the prompt to the calls in the answer."""

import json
import random

import pytest

from herder.checkpoint.source import resolve_model
from herder.config.run import ServeConfig
from herder.serve.load import load_service
from herder.serve.tools import _HERMES, _LLAMA, _MISTRAL, CallReader

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <|im_end|> of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Pisa", "北京"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ASK = [{"role": "user", "content": "How is it?"}]
BODY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
END = "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
LIST = "{% for t in tools or [] %}{{ t.function.name }} {{ t.function.description }}\n{% endfor %}"
TEMPLATES = {
    "hermes": LIST
    + BODY
    + "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}" + END,
    "mistral": LIST
    + BODY
    + "{% if m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | map(attribute='function') | list"
    " | tojson }}{% endif %}" + END,
    "llama": LIST
    + BODY
    + """{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", "parameters": """
    "{{ c.function.arguments | tojson }}}{% endfor %}" + END,
    "unknown": LIST + BODY + "<tool_call><function=name>" + END,
}
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a}\\"{"}}\n</tool_call>'
HERMES_TWO = f'Let me see. {HERMES_CALL}\n<tool_call>\n{{"name":"clock","arguments":{{}}}}\n'


def read(form, text, cuts=()):
    """What a reader makes of a text in pieces."""
    reader = CallReader(form, ["get_weather", "clock"])
    content, calls = "", {}
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for part, deltas in [*(reader.add(piece) for piece in pieces), reader.finish()]:
        content += part
        for delta in deltas:
            call = calls.setdefault(delta["index"], ["", ""])
            call[0] += delta["function"].get("name", "")
            call[1] += delta["function"]["arguments"]
    return content, [tuple(call) for call in calls.values()]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (_HERMES, "plain < text <tool_cal", "plain < text <tool_cal", []),
        (_HERMES, HERMES_CALL, "", [("get_weather", '{"city": "a}\\"{"}')]),
        (
            _HERMES,
            HERMES_TWO,
            "Let me see. ",
            [("get_weather", '{"city": "a}\\"{"}'), ("clock", "{}")],
        ),
        (
            _HERMES,
            '<tool_call>{"arguments": {"a": {}}, "name": "clock"}</tool_call>!',
            "!",
            [("clock", '{"a": {}}')],
        ),
        (_HERMES, '<tool_call>{"name": "clock"}</tool_call>', "", [("clock", "{}")]),
        (_HERMES, '<tool_call>{"name": "rm"}</tool_call>', None, []),
        (_HERMES, '<tool_call>{"name": "clock", "arguments": [1]}', None, []),
        (_HERMES, "<tool_call>\nnot JSON", None, []),
        (_HERMES, "<tool_call>{{}}</tool_call>", None, []),
        (_HERMES, '<tool_call>\n{"name": "get_wea', None, []),
        (_HERMES, '<tool_call>\n{"name": "clock", "arguments": {"a', "", [("clock", '{"a')]),
        (
            _MISTRAL,
            '[TOOL_CALLS] [{"name": "clock", "arguments": {}}, '
            '{"name": "get_weather", "arguments": {"city": "Pisa"}}]',
            "",
            [("clock", "{}"), ("get_weather", '{"city": "Pisa"}')],
        ),
        (_MISTRAL, "[1, 2] [TOOL_CALL", "[1, 2] [TOOL_CALL", []),
        (_LLAMA, '{"name": "clock", "parameters": {}}', "", [("clock", "{}")]),
        (_LLAMA, '<|python_tag|>{"name": "clock", "parameters": {}}', "", [("clock", "{}")]),
        (_LLAMA, 'Sure: {"name": "clock", "parameters": {}}', None, []),
        (_LLAMA, '{"age": 3, "name": {"a": 1}} and so on', None, []),
        (_LLAMA, "", "", []),
    ],
)
def test_a_text_in_any_pieces_is_the_same_calls_and_text(form, text, content, calls) -> None:
    expected = (text if content is None else content, calls)
    assert read(form, text) == expected
    assert read(form, text, range(1, len(text))) == expected
    for seed in range(20):
        cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=3))
        assert read(form, text, cuts) == expected


def test_no_text_makes_the_reading_fail_or_lose_what_is_no_call() -> None:
    pieces = ["<tool_call>", "</tool_call>", "{", "}", '"', "\\", "[TOOL_CALLS]", "name", ":", " "]
    pieces += ['{"name": "clock", "arguments": {', "<|python_tag|>", ";", ",", "]", "é"]
    for seed in range(600):
        chosen = random.Random(seed).choices(pieces, k=12)
        for form in (_HERMES, _MISTRAL, _LLAMA):
            content, calls = read(form, "".join(chosen))
            assert calls or content == "".join(chosen)


@pytest.fixture(scope="module")
def folder_of(tiny_chat_model, tmp_path_factory):
    """The tiny model with another chat template."""

    def folder_of(kind):
        folder = tmp_path_factory.mktemp("tools") / kind
        folder.mkdir()
        for file in tiny_chat_model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        settings = {"eos_token": "</s>", "chat_template": TEMPLATES[kind]}
        if kind == "mistral":
            backend = json.loads((folder / "tokenizer.json").read_text())
            mark = {"id": 400, "content": "[TOOL_CALLS]", "special": True, "normalized": False}
            flags = {"single_word": False, "lstrip": False, "rstrip": False}
            backend["added_tokens"].append({**mark, **flags})
            (folder / "tokenizer.json").write_text(json.dumps(backend))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return folder_of


@pytest.fixture
def serve_kind(serve, folder_of):
    """A server of the tiny model that was taught one form of calls."""

    def serve_kind(kind):
        folder = folder_of(kind)
        config = ServeConfig(precision="fp32")
        return serve(load_service(resolve_model(str(folder)), folder, config))

    return serve_kind


def post(api, status=200, **fields):
    body = {"messages": ASK, "tools": TOOLS, "temperature": 1, "seed": 1, **fields}
    response = api.http.post("/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    return response.json()


def check_calls(calls) -> None:
    assert calls
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        assert call["type"] == "function"
        assert len(call["id"]) == 9
        if call["function"]["name"] == "clock":
            assert arguments == {}
        else:
            assert call["function"]["name"] == "get_weather"
            assert arguments["city"] in ("Pisa", "北京")
            assert isinstance(arguments.get("days", 0), int)


@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama"])
def test_a_forced_call_is_made_whatever_the_model_likes(serve_kind, kind) -> None:
    api = serve_kind(kind)
    num_stopped = 0
    for choice in post(api, tool_choice="required", n=3, parallel_tool_calls=False)["choices"]:
        if choice["finish_reason"] == "tool_calls":
            num_stopped += 1
            check_calls(choice["message"]["tool_calls"])
            assert choice["message"]["content"] is None
        else:
            assert choice["finish_reason"] == "length"
    assert num_stopped
    named = {"type": "function", "function": {"name": "clock"}}
    done = post(api, tool_choice=named, parallel_tool_calls=False)
    [call] = done["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": "{}"}


def test_streamed_deltas_joined_are_the_calls_of_the_whole_answer(serve_kind) -> None:
    api = serve_kind("mistral")
    options = {"tools": TOOLS, "tool_choice": "required", "seed": 5, "temperature": 1}
    model = {"model": "mistral", "messages": ASK, **options}
    whole = api.openai.chat.completions.create(**model).choices[0]
    chunks = [c.choices[0] for c in api.openai.chat.completions.create(**model, stream=True)]
    calls = {}
    for delta in (d for c in chunks for d in c.delta.tool_calls or ()):
        if delta.id:
            assert delta.index == len(calls)
            calls[delta.index] = [delta.function.name, ""]
        calls[delta.index][1] += delta.function.arguments
    assert [tuple(call) for call in calls.values()] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
    assert "".join(c.delta.content or "" for c in chunks) == (whole.message.content or "")
    assert [c.finish_reason for c in chunks][:-1] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason


def test_a_call_that_the_length_cuts_is_no_failure(serve_kind) -> None:
    api = serve_kind("hermes")
    named = {"type": "function", "function": {"name": "get_weather"}}
    seen = set()
    for max_tokens in (1, 5, 15, 25, 35, 45):
        done = post(api, tool_choice=named, max_tokens=max_tokens)["choices"][0]
        assert done["finish_reason"] in ("length", "tool_calls")
        message = done["message"]
        assert message["content"] or message["tool_calls"]
        seen.add("tool_calls" in message)
    assert seen == {True, False}


def test_tools_are_in_the_prompt_as_text_and_not_with_choice_none(serve_kind) -> None:
    api = serve_kind("hermes")

    def count(**fields):
        return post(api, max_tokens=1, **fields)["usage"]["prompt_tokens"]

    asked = {"messages": ASK, "tools": TOOLS}
    tokens = api.http.post("/tokenize", json=asked).json()["tokens"]
    assert count() == len(tokens)
    text = api.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "get_weather The weather <|im_end|> of" in text
    [end] = api.service.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert tokens.count(end) == 1
    plain = api.http.post("/tokenize", json={"messages": ASK}).json()["count"]
    assert count(tool_choice="none") == plain


def test_calls_and_their_results_are_written_by_the_template(serve_kind) -> None:
    api = serve_kind("hermes")
    call = {
        "id": "123456789",
        "type": "function",
        "function": {"name": "clock", "arguments": '{"at": [1]}'},
    }
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "noon"},
    ]
    tokens = api.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = api.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert '<tool_call>\n{"name": "clock", "arguments": {"at": [1]}}\n</tool_call>' in text
    assert "<|im_start|>tool\nnoon" in text
    assert post(api, messages=messages, max_tokens=2)["choices"]


def test_a_template_without_tools_or_of_another_form_refuses_them(api, serve_kind) -> None:
    for server, reason in ((api, "no place for tools"), (serve_kind("unknown"), "not read here")):
        error = post(server, 400)["error"]
        assert error["param"] == "tools"
        assert reason in error["message"]
        result = {"role": "tool", "content": "noon"}
        told = post(server, 400, tools=[], messages=[*ASK, result])["error"]["message"]
        assert reason in told


@pytest.mark.parametrize(
    ("fields", "parameter", "message"),
    [
        ({"tools": []} | {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "tool_choice",
            "get_weather, clock",
        ),
        ({"tool_choice": "always"}, "tool_choice", "'required'"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "one name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"tools": [{"type": "web"}]}, "tools", "'function'"),
        ({"response_format": {"type": "json_object"}}, "response_format", "no room for calls"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "a", "parameters": {"$ref": "#/$defs/b"}},
                    }
                ],
            },
            "tools",
            "does not exist",
        ),
        ({"messages": [{**ASK[0], "tool_call_id": "1"}]}, "messages", "role tool alone"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "{"}}],
                    }
                ]
            },
            "messages",
            "text of a JSON object",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(serve_kind, fields, parameter, message) -> None:
    error = post(serve_kind("hermes"), 400, **fields)["error"]
    assert error["param"] == parameter
    assert message in error["message"]


def test_a_forced_call_obeys_parallel_tool_calls_and_a_free_one_names_it(serve_kind) -> None:
    api = serve_kind("hermes")
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 2, "parallel_tool_calls": False}
    headers = [
        api.http.post("/v1/chat/completions", json={**body, "tool_choice": choice}).headers
        for choice in ("auto", "required")
    ]
    assert [h.get("x-herder-ignored-fields") for h in headers] == ["parallel_tool_calls", None]
