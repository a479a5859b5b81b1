"""One bad request gets a 4xx that names its field, and nothing else changes."""

import json

import pytest

from herder.serve.protocol import (
    AnswerBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

RAW_VALUES = (
    "null",
    "0",
    "-1",
    "1",
    "0.5",
    "true",
    '"x"',
    '""',
    "[]",
    "{}",
    "NaN",
    "1e400",
    "1000000000000000000000000000000",
    "[[]]",
    "[-1]",
    "[99999]",
    '{"99999": 1}',
    '{"x": NaN}',
    '{"5": 101}',
)
ANYTHING = set(RAW_VALUES) - {"NaN", "1e400", '{"x": NaN}'}
OBJECT = {"{}", '{"99999": 1}', '{"5": 101}'}
NUMBER = {"0", "1", "0.5"}
FLAG = {"true"}
FINE_IN_BOTH = {
    "model": set(),
    "stream": FLAG,
    "stream_options": set(),
    "n": {"1"},
    "min_tokens": {"0", "1"},
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": {"0", "-1", "1"},
    "min_p": NUMBER,
    "seed": {"0", "-1", "1"},
    "presence_penalty": NUMBER | {"-1"},
    "frequency_penalty": NUMBER | {"-1"},
    "repetition_penalty": {"1", "0.5"},
    "logit_bias": {"{}"},
    "stop": {'"x"', "[]"},
    "stop_token_ids": {"[]"},
    "include_stop_str_in_output": FLAG,
    "ignore_eos": FLAG,
    "cache_salt": {'"x"'},
    "response_format": set(),
    "user": ANYTHING,
    "metadata": ANYTHING,
    "store": ANYTHING,
    "service_tier": ANYTHING,
    "safety_identifier": ANYTHING,
}
FINE = {
    "/v1/completions": {
        **FINE_IN_BOTH,
        "prompt": {'"x"'},
        "tools": {"[]"},
        "tool_choice": set(),
        "max_tokens": {"1"},
        "echo": FLAG,
        "logprobs": {"0", "1"},
        "suffix": {'""'},
        "best_of": {"1"},
    },
    "/v1/chat/completions": {
        **FINE_IN_BOTH,
        "messages": set(),
        "tools": {"[]"},
        "tool_choice": set(),
        "max_tokens": {"1"},
        "max_completion_tokens": {"1"},
        "logprobs": FLAG,
        "top_logprobs": set(),
        "chat_template_kwargs": OBJECT,
        "parallel_tool_calls": FLAG,
        "functions": {"[]"},
        "function_call": set(),
        "modalities": set(),
        "audio": set(),
        "prediction": set(),
        "reasoning_effort": set(),
        "verbosity": set(),
        "web_search_options": set(),
    },
    "/tokenize": {
        "model": set(),
        "prompt": {'"x"', '""'},
        "messages": set(),
        "tools": {"[]"},
        "add_special_tokens": FLAG,
        "chat_template_kwargs": OBJECT,
    },
    "/detokenize": {"model": set(), "tokens": {"[]"}},
}
BASE = {
    "/v1/completions": {"prompt": '"The"', "max_tokens": "2"},
    "/v1/chat/completions": {
        "messages": '[{"role": "user", "content": "The"}]',
        "max_completion_tokens": "2",
    },
    "/tokenize": {"prompt": '"The"'},
    "/detokenize": {"tokens": "[1]"},
}
REQUIRED = {"prompt", "messages", "tokens"}


def post_raw(api, path, text):
    """One request with a body as it is."""
    content = text if isinstance(text, bytes) else text.encode()
    return api.http.post(path, content=content, headers={"content-type": "application/json"})


def raw_object(fields):
    """A JSON object whose values are raw text, as strict writers would not write them."""
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def is_fine(path, field, value):
    """Whether the table allows it; null is the same as absent."""
    if value == "null":
        return field not in REQUIRED or path == "/tokenize"
    return value in FINE[path][field]


def each_field():
    """Every field of every path, once where several have the same rule."""
    alike = {"metadata", "store", "service_tier", "safety_identifier"}
    for path, fields in FINE.items():
        for field in fields:
            is_shared = path == "/v1/chat/completions" and field in FINE_IN_BOTH
            if not is_shared and field not in alike:
                yield path, field


@pytest.mark.parametrize(("path", "field"), list(each_field()))
def test_every_bad_value_of_a_field_is_told_by_its_name(api, path, field) -> None:
    for value in RAW_VALUES:
        fields = {**BASE[path], field: value}
        if field == "max_tokens" and path == "/v1/chat/completions":
            del fields["max_completion_tokens"]
        if path == "/tokenize" and field in ("prompt", "messages"):
            fields = {field: value}
        response = post_raw(api, path, raw_object(fields))
        if is_fine(path, field, value) and not (path == "/tokenize" and fields == {field: "null"}):
            assert response.status_code == 200, (value, response.text)
            continue
        is_name = field == "model" and value in ('"x"', '""')
        assert response.status_code == (404 if is_name else 400), (value, response.text)
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert field in error["message"], (value, error)
        assert error["param"] in (field, None), (value, error)
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/completions", CompletionBody),
        ("/v1/chat/completions", ChatBody),
        ("/tokenize", TokenizeBody),
        ("/detokenize", DetokenizeBody),
    ],
)
def test_the_table_has_every_field(path, kind) -> None:
    assert FINE[path].keys() == kind.model_fields.keys()
    assert AnswerBody.model_fields.keys() == FINE_IN_BOTH.keys()


@pytest.mark.parametrize(
    "body",
    [
        b"{:",
        b"",
        b"[]",
        b"1",
        b"null",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": "\\udfff"}',
        b'{"prompt": "a", "stream": "true"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"1" * 5000 + b"}",
        b'{"prompt": []}',
        b'{"prompt": [[]]}',
        b'{"prompt": ""}',
        b'{"prompt": ["a", ""]}',
        b'{"prompt": [[1], []]}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [1, -1]}',
        b'{"prompt": [1, 99999]}',
        b'{"prompt": [1, 1.0]}',
        b'{"prompt": [true]}',
    ],
    ids=lambda body: body[:40].decode(errors="replace"),
)
def test_a_body_that_is_no_request_is_refused(api, body) -> None:
    response = post_raw(api, "/v1/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "parameter", "message"),
    [
        ("/v1/completions", {"max_tokens": -17032}, "max_tokens", "greater than or equal to 0"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens", "0 needs echo"),
        ("/v1/completions", {"max_tokens": 10_000}, "max_tokens", "window of 256 tokens"),
        ("/v1/completions", {"logit_bias": {"9999999": 5}}, "logit_bias", "0 to 415"),
        ("/v1/completions", {"logit_bias": {"416": 5}}, "logit_bias", "0 to 415"),
        ("/v1/completions", {"stop_token_ids": [151645]}, "stop_token_ids", "0 to 415"),
        ("/v1/completions", {"logprobs": 100_000}, "logprobs", "less than or equal to 20"),
        ("/v1/completions", {"n": 1_000_000}, "n", "less than or equal to 128"),
        ("/v1/completions", {"prompt": ["a"] * 3, "n": 100}, "n", "make 300 answers"),
        ("/v1/completions", {"best_of": 3}, "best_of", "only n"),
        ("/v1/completions", {"repetition_penalty": 5e-324}, "repetition_penalty", "0.01"),
        ("/v1/completions", {"min_tokens": 5}, "min_tokens", "exceeds the longest answer, 2"),
        (
            "/v1/completions",
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "stream: true",
        ),
        ("/v1/completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options", "x"),
        ("/v1/completions", {"suffix": "x"}, "suffix", "not supported yet"),
        ("/v1/completions", {"tempreature": 1}, "tempreature", "Did you mean 'temperature'?"),
        ("/v1/completions", {"messages": []}, "messages", "unknown field"),
        ("/v1/chat/completions", {"messages": []}, "messages", "at least 1 item"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "king", "content": "a"}]},
            "messages",
            "'system'",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages", "content: required"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": None}]},
            "messages",
            "content",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "'text'",
        ),
        ("/v1/chat/completions", {"max_tokens": 1}, "max_tokens", "differs"),
        (
            "/v1/chat/completions",
            {"max_completion_tokens": 0},
            "max_completion_tokens",
            "equal to 1",
        ),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ("/v1/completions", {"tools": [{"type": "function"}]}, "tools", "not supported yet"),
        ("/v1/completions", {"tool_choice": "auto"}, "tool_choice", "not supported yet"),
        (
            "/tokenize",
            {"tools": [{"type": "function", "function": {"name": "a"}}]},
            "tools",
            "mess",
        ),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "messages",
        ),
        ("/detokenize", {"tokens": [416]}, "tokens", "0 to 415"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, None, "exactly one"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_its_reason(
    api, path, fields, parameter, message
) -> None:
    body = {key: json.loads(value) for key, value in BASE[path].items()}
    response = api.http.post(path, json={**body, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == parameter


def test_values_that_ask_for_nothing_are_fine(api) -> None:
    neutral = {
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "function_call": "none",
        "modalities": ["text"],
        "stream": True,
        "stream_options": {"include_usage": False, "include_obfuscation": False},
    }
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "refusal": None}
    body = {"messages": [{**message, "tool_calls": []}], "max_tokens": 1, **neutral}
    assert api.http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_change_nothing_are_named_in_a_header(api, stream) -> None:
    message = {"role": "user", "content": "a"}
    body = {"messages": [message], "max_tokens": 1, "stream": stream}
    ignored = {"user": "me", "metadata": {"a": 1}, "parallel_tool_calls": False, "store": None}
    response = api.http.post("/v1/chat/completions", json={**body, **ignored})
    assert response.headers["x-herder-ignored-fields"] == "user, metadata, parallel_tool_calls"
    plain = api.http.post("/v1/chat/completions", json=body)
    assert "x-herder-ignored-fields" not in plain.headers


def test_a_prompt_longer_than_the_window_is_refused_with_both_numbers(api) -> None:
    for fields in ({}, {"stream": True}, {"max_tokens": 1}):
        response = api.http.post("/v1/completions", json={"prompt": [1] * 300, **fields})
        assert response.status_code == 400
        assert "300 tokens" in response.json()["error"]["message"]
        assert "256 tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_another_model_is_not_found(api, path) -> None:
    body = {key: json.loads(value) for key, value in BASE[path].items()}
    response = api.http.post(path, json={**body, "model": "gpt-5"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "'tiny-chat' is" in response.json()["error"]["message"]


def test_unknown_paths_and_methods_are_errors_of_the_same_shape(api) -> None:
    missing = api.http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, None)
    wrong = api.http.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "GET /v1/completions" in wrong.json()["error"]["message"]


def test_a_body_that_is_too_large_is_refused(api) -> None:
    large = json.dumps({"prompt": "a" * 300_000})
    told = post_raw(api, "/v1/completions", large)
    assert told.status_code == 413
    assert "200000 bytes" in told.json()["error"]["message"]

    def chunks():
        for start in range(0, len(large), 10_000):
            yield large[start : start + 10_000].encode()

    counted = api.http.post(
        "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
    )
    assert counted.status_code == 413


def test_a_body_of_another_kind_is_refused_with_the_header_that_is_missing(api) -> None:
    response = api.http.post("/v1/completions", content=b'{"prompt": "a"}')
    assert response.status_code == 400
    assert "content-type: application/json" in response.json()["error"]["message"]
