"""An answer of a given form has that form, whatever the model would rather say."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from herder.serve import grammar


class Person(BaseModel):
    """What the schema of these tests is made from, and what its answers are checked by."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=12)]
    kind: Literal["猫", "🙂 dog"]
    age: Annotated[int, Field(ge=0, le=150)]
    tags: Annotated[list[Annotated[str, Field(pattern="^[a-c]{1,3}$")]], Field(max_length=2)] = []
    friend: "Person | None"


def form_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


PERSON = form_of(Person.model_json_schema())


def ask(api, *, path="/v1/chat/completions", **fields):
    asked = {"prompt": "Tell"} if path == "/v1/completions" else {}
    asked = asked or {"messages": [{"role": "user", "content": "Tell"}]}
    body = {**asked, "temperature": 1, "max_tokens": 200, **fields}
    response = api.http.post(path, json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    return [(c["text"] if "text" in c else c["message"]["content"], c) for c in choices]


def whole(answers):
    """The texts that the length did not cut."""
    ended = [text for text, choice in answers if choice["finish_reason"] == "stop"]
    assert ended, "no answer came to its end"
    return ended


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("seed", [1, 2])
def test_answers_that_end_validate_against_their_schema(api, path, seed) -> None:
    for text in whole(ask(api, path=path, response_format=PERSON, n=8, seed=seed)):
        Person.model_validate_json(text)


def test_json_objects_parse_with_any_temperature(api) -> None:
    form = {"type": "json_object"}
    for temperature in (0.7, 2):
        answers = ask(api, response_format=form, n=12, seed=3, temperature=temperature)
        assert all(isinstance(json.loads(text), dict) for text in whole(answers))
        for text, choice in answers:
            assert choice["finish_reason"] in ("stop", "length")
            assert text.startswith("{")
            assert "\ufffd" not in text[:-1]


def test_greedy_answers_are_grammatical_too(api) -> None:
    [(text, choice)] = ask(api, response_format=form_of({"const": "今天 🙂"}), temperature=0)
    assert (json.loads(text), choice["finish_reason"]) == ("今天 🙂", "stop")


def test_a_stream_joined_is_the_whole_answer(api) -> None:
    [(text, _)] = ask(api, response_format=PERSON, seed=4)
    body = {"messages": [{"role": "user", "content": "Tell"}], "temperature": 1, "seed": 4}
    chunks = api.openai.chat.completions.create(
        model="tiny-chat", **body, max_tokens=200, response_format=PERSON, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_text_is_no_constraint(api) -> None:
    free = ask(api, seed=5, max_tokens=20)[0][0]
    assert ask(api, seed=5, max_tokens=20, response_format={"type": "text"})[0][0] == free
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(free)


def test_the_end_of_a_grammar_wins_over_min_tokens(api) -> None:
    [(text, choice)] = ask(api, response_format=form_of({"const": 1}), min_tokens=50)
    assert (text, choice["finish_reason"]) == ("1", "stop")
    # Where the grammar lets an answer go on as well as end, min_tokens holds.
    digits = form_of({"type": "integer"})
    for text, choice in ask(api, response_format=digits, min_tokens=20, max_tokens=60, n=4, seed=1):
        assert choice["finish_reason"] == "length" or len(text) >= 20


def test_answers_beside_a_grammar_are_what_they_are_alone(api) -> None:
    alone = ask(api, seed=6, max_tokens=40)[0][0]
    formed = ask(api, seed=6, response_format=PERSON)[0][0]
    with ThreadPoolExecutor(4) as pool:
        forms = [None, PERSON] * 4
        asked = [pool.submit(ask, api, seed=6, response_format=form) for form in forms]
        texts = [future.result()[0][0] for future in asked]
    assert {text[: len(alone)] for text in texts[::2]} == {alone}
    assert set(texts[1::2]) == {formed}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "json_schema"}, "needs the key json_schema"),
        ({"type": "json_object", "json_schema": {"name": "a"}}, "no other type does"),
        ({"type": "yaml"}, "'json_schema'"),
        (form_of({"$ref": "#/$defs/none"}), "'/$defs/none' does not exist"),
        (form_of({"$ref": "http://127.0.0.1/schema"}), "not present in a registry"),
        (form_of({"type": "string", "pattern": "(("}), "unclosed group"),
        (form_of({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (form_of({"type": "text"}), "Invalid type: text"),
        (form_of({"type": 5}), "type must be a string"),
        (form_of({"properties": 5}), "properties must be an object"),
        (form_of({"enum": []}), "Unsatisfiable"),
        (form_of({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (form_of({"enum": ["x" * 150_000]}), "longer than"),
        (form_of(5), "json_schema.schema"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_form_is_refused_with_its_reason(api, form, message, stream) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    asked = {**body, "response_format": form, "stream": stream}
    response = api.http.post("/v1/chat/completions", json=asked)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "response_format"
    assert message in error["message"]


@pytest.mark.parametrize("depth", [90, 150])
def test_a_schema_nested_too_deep_is_refused(api, depth) -> None:
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": form_of(schema)}
    response = api.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert "recursion" in response.json()["error"]["message"]


def test_a_grammar_that_takes_too_long_costs_its_own_request_alone(api, monkeypatch) -> None:
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.05)
    # Choices of many long objects: seconds of work, which no step of the engine waits for.
    slow = {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    f"k{i}": {"type": "string", "minLength": j, "maxLength": i * 1000}
                    for i in range(50)
                },
            }
            for j in range(40)
        ]
    }
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    with ThreadPoolExecutor(1) as pool:
        formed = {**body, "response_format": form_of(slow)}
        refused = pool.submit(api.http.post, "/v1/chat/completions", json=formed)
        assert api.http.post("/v1/chat/completions", json=body).status_code == 200
        response = refused.result()
    assert response.status_code == 400, response.text
    assert "takes longer than 0.05 s" in response.json()["error"]["message"]


def test_ignore_eos_has_no_sense_with_a_form(api) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": PERSON}
    response = api.http.post("/v1/chat/completions", json={**body, "ignore_eos": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "ignore_eos")
