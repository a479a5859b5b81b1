import json

import pytest

PROMPT = "The quick brown"
GREEDY = {"model": "tiny-chat", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}


def streamed(api, **fields):
    """All chunks of a stream by the official client."""
    return list(api.openai.completions.create(**{**GREEDY, **fields}, stream=True))


def text_of(chunks, index=0):
    """The joined deltas of one choice."""
    return "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)


def test_the_official_client_gets_the_text_of_the_tokens(api) -> None:
    done = api.openai.completions.create(**GREEDY)
    ids = api.service.tokenizer.encode(PROMPT, add_special_tokens=True)
    assert done.object == "text_completion"
    assert done.model == "tiny-chat"
    assert done.id.startswith("cmpl-")
    assert done.usage.prompt_tokens == len(ids)
    assert done.usage.total_tokens == len(ids) + done.usage.completion_tokens
    logged = api.openai.completions.create(**GREEDY, logprobs=0)
    assert logged.choices[0].text == done.choices[0].text
    assert len(logged.choices[0].logprobs.tokens) == done.usage.completion_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.3, "seed": 1},
        {"temperature": 2, "seed": 2, "max_tokens": 80},
        {"temperature": 1, "seed": 3, "stop": ["e", "今"]},
        {"temperature": 1, "seed": 3, "stop": "a"},
        {"echo": True, "temperature": 1, "seed": 4},
        {"n": 3, "temperature": 1, "seed": 5},
        {"logprobs": 2, "temperature": 1, "seed": 6},
        {"prompt": ["The", "quick", "brown"], "temperature": 1, "seed": 7},
    ],
    ids=json.dumps,
)
def test_a_stream_joined_is_the_whole_answer(api, fields) -> None:
    whole = api.openai.completions.create(**{**GREEDY, **fields})
    chunks = streamed(api, **fields)
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert text_of(chunks, choice.index) == choice.text
        assert [c.finish_reason for c in own][:-1] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == choice.finish_reason in ("stop", "length")
        if choice.logprobs:
            joined = [t for c in own if c.logprobs for t in c.logprobs.tokens]
            assert joined == choice.logprobs.tokens
            offsets = [t for c in own if c.logprobs for t in c.logprobs.text_offset]
            assert offsets == choice.logprobs.text_offset


def test_the_text_is_what_the_ids_decode_to(api) -> None:
    ids = api.service.tokenizer.encode(PROMPT, add_special_tokens=True)
    prompted = {**GREEDY, "prompt": ids, "seed": 8, "temperature": 1.5, "max_tokens": 60}
    done = api.openai.completions.create(**prompted, logprobs=0, extra_body={"ignore_eos": True})
    assert done.choices[0].finish_reason == "length"
    scored = api.http.post(
        "/v1/completions", json={**prompted, "logprobs": 0, "ignore_eos": True}
    ).json()
    assert scored["choices"][0]["text"] == done.choices[0].text
    # The same text from the tokens alone, through a second request that scores text and answer.
    tokens = done.choices[0].logprobs.tokens
    assert len(tokens) == 60
    clean = [token for token in tokens if token not in ("<s>", "</s>")]
    if "\ufffd" not in "".join(clean):
        assert "".join(t for t in clean if not t.startswith("<|im")) == done.choices[0].text


def test_usage_comes_last_in_a_stream_and_only_when_asked_for(api) -> None:
    lines = raw_stream(api, {**GREEDY, "stream_options": {"include_usage": True}})
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    plain = [json.loads(line) for line in raw_stream(api, GREEDY)[:-1]]
    assert all("usage" not in chunk for chunk in plain)


def raw_stream(api, body):
    """The data of each event as it came over the wire."""
    with api.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    events = [part for part in text.split("\n\n") if part]
    assert text.endswith("\n\n")
    return [part.removeprefix("data: ") for part in events if not part.startswith(":")]


def test_every_choice_ends_exactly_once(api) -> None:
    lines = raw_stream(api, {**GREEDY, "n": 3, "temperature": 1, "seed": 1})
    chunks = [json.loads(line) for line in lines[:-1]]
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


def test_an_answer_does_not_depend_on_how_many_are_asked_for(api) -> None:
    fields = {**GREEDY, "temperature": 1, "seed": 11}
    one = api.openai.completions.create(**fields)
    three = api.openai.completions.create(**fields, n=3)
    assert three.choices[0].text == one.choices[0].text
    assert len({choice.text for choice in three.choices}) == 3
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    second = api.openai.completions.create(**{**fields, "seed": 12})
    assert three.choices[1].text == second.choices[0].text


def test_a_prompt_that_is_cached_gives_the_same_answer_unless_its_salt_differs(api) -> None:
    def hits(**fields) -> tuple[float, str]:
        before = api.metric("prefix_cache_hits_total")
        body = {"prompt": list(range(5, 45)), "max_tokens": 8, "temperature": 0, **fields}
        text = api.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        return api.metric("prefix_cache_hits_total") - before, text

    queries = api.metric("prefix_cache_queries_total")
    (_, first), (found, again), (salted, other) = hits(), hits(), hits(cache_salt="mine")
    assert (found, salted) == (32, 0)
    assert first == again == other
    assert hits(cache_salt="mine")[0] == 32
    assert api.metric("prefix_cache_queries_total") == queries + 160


def test_several_prompts_are_answered_side_by_side(api) -> None:
    fields = {**GREEDY, "temperature": 1, "seed": 2}
    both = api.openai.completions.create(**{**fields, "prompt": ["The", "lazy dog"], "n": 2})
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = api.openai.completions.create(**{**fields, "prompt": "lazy dog"})
    assert both.choices[2].text == alone.choices[0].text


def test_echo_gives_the_prompt_before_the_answer(api) -> None:
    plain = api.openai.completions.create(**GREEDY)
    echoed = api.openai.completions.create(**GREEDY, echo=True)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_every_token_at_its_place(api, max_tokens, stream) -> None:
    body = {**GREEDY, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    if stream:
        chunks = streamed(api, **{key: body[key] for key in ("max_tokens", "echo", "logprobs")})
        choices = [c for chunk in chunks for c in chunk.choices]
        text = "".join(c.text for c in choices)
        fields = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        logprobs = {f: [x for c in choices for x in getattr(c.logprobs, f)] for f in fields}
    else:
        choice = api.http.post("/v1/completions", json=body).json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    num_prompt = len(api.service.tokenizer.encode(PROMPT, add_special_tokens=True))
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert {len(values) for values in logprobs.values()} == {num_prompt + max_tokens}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    for token, offset in zip(tokens, offsets, strict=True):
        if "\ufffd" not in token and not token.startswith("<"):
            assert text[offset:].startswith(token)


def test_a_stop_string_is_never_seen(api) -> None:
    whole = api.openai.completions.create(**GREEDY).choices[0].text
    stop = whole[5:8]
    done = api.openai.completions.create(**GREEDY, stop=[stop])
    assert done.choices[0].text == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    assert text_of(streamed(api, stop=[stop])) == done.choices[0].text
    shown = api.openai.completions.create(
        **GREEDY, stop=[stop], extra_body={"include_stop_str_in_output": True}
    )
    assert shown.choices[0].text == done.choices[0].text + stop


def test_a_stop_string_that_is_a_control_token_ends_the_answer(api) -> None:
    start = api.service.tokenizer.encode("<|im_start|>", add_special_tokens=False)
    assert len(start) == 1
    forced = {**GREEDY, "logit_bias": {str(start[0]): 100}}
    done = api.openai.completions.create(**forced, stop=["<|im_start|>"])
    assert (done.choices[0].finish_reason, done.choices[0].text) == ("stop", "")
    assert done.usage.completion_tokens == 1
    refused = api.http.post(
        "/v1/completions",
        json={**forced, "stop": "<|im_start|>", "include_stop_str_in_output": True},
    )
    assert refused.status_code == 400


def test_half_a_character_at_the_end_is_replaced(api) -> None:
    first = api.service.tokenizer.encode("🙂", add_special_tokens=False)[0]
    body = {**GREEDY, "max_tokens": 2, "logit_bias": {first: 100}}
    done = api.http.post("/v1/completions", json=body)
    assert done.status_code == 200
    assert done.json()["choices"][0]["text"].count("\ufffd") >= 1
    chunks = streamed(api, max_tokens=2, logit_bias={str(first): 100})
    assert text_of(chunks) == done.json()["choices"][0]["text"]


def test_impossible_tokens_have_finite_logprobs(api) -> None:
    body = {**GREEDY, "logprobs": 20, "logit_bias": {str(i): -100 for i in range(40)}, "top_k": 1}
    done = api.http.post("/v1/completions", json=body)
    assert done.status_code == 200
    assert all(value >= -9999 for value in done.json()["choices"][0]["logprobs"]["token_logprobs"])


def test_counters_equal_the_sums_of_usage(api) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total")
    before = [api.metric(name) for name in names]
    finished = api.metric("request_success_total")
    prompt_tokens = completion_tokens = 0
    for fields in ({}, {"n": 3, "temperature": 1}, {"prompt": ["a", "b c"], "n": 2}):
        usage = api.openai.completions.create(**{**GREEDY, **fields}).usage
        prompt_tokens += usage.prompt_tokens
        completion_tokens += usage.completion_tokens
    api.wait_idle()
    after = [api.metric(name) for name in names]
    gained = [one - other for one, other in zip(after, before, strict=True)]
    assert gained == [prompt_tokens, completion_tokens]
    assert api.metric("request_success_total") - finished == 1 + 3 + 4
