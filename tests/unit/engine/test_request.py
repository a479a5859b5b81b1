import math

import pytest

from herder.engine.request import Limits, Request, SamplingParams, check_request
from herder.errors import RequestError

HUGE = 10**30
LIMITS = Limits(window_tokens=32, vocab_size=100)

WRONG_KIND = ["1", True, [], {}]
BAD_VALUES = {
    "max_tokens": [-1, 1.5, *WRONG_KIND],
    "min_tokens": [None, -1, 1.5, *WRONG_KIND],
    "temperature": [None, -1, 2.1, HUGE, math.nan, math.inf, 1e400, *WRONG_KIND],
    "top_p": [None, -1, 1.1, math.nan, math.inf, 1e400, *WRONG_KIND],
    "top_k": [None, -2, HUGE, 0.5, *WRONG_KIND],
    "min_p": [None, -1, 1.1, math.nan, math.inf, *WRONG_KIND],
    "seed": [HUGE, -HUGE, 0.5, *WRONG_KIND],
    "presence_penalty": [None, -2.1, 2.1, math.nan, math.inf, *WRONG_KIND],
    "frequency_penalty": [None, -2.1, 2.1, math.nan, math.inf, *WRONG_KIND],
    "repetition_penalty": [None, 0, -1, 2.1, math.nan, math.inf, *WRONG_KIND],
    "logit_bias": [None, {1: 101.0}, {1: math.nan}, {-1: 1.0}, {"a": 1.0}, {1: "1"}, 1, "a", []],
    "logprobs": [-1, 21, 100_000, 0.5, *WRONG_KIND],
    "prompt_logprobs": [-1, 21, 0.5, *WRONG_KIND],
    "stop": [None, ("",), ("x" * 257,), ("x",) * 17, (1,), "", "x" * 257, 1],
    "stop_token_ids": [None, (-1,), (HUGE,), (0.5,), ("a",), 1],
    "include_stop_str_in_output": [None, 0, 1, "true"],
    "ignore_eos": [None, 0, 1, "true"],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in BAD_VALUES.items() for value in values],
    ids=lambda part: str(part)[:20],
)
def test_a_bad_value_is_refused_with_its_fields_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.parameter == field
    assert field in str(caught.value)


def test_every_field_has_bad_values_in_the_table() -> None:
    assert BAD_VALUES.keys() == SamplingParams.model_fields.keys()


def test_absent_fields_and_the_ends_of_each_range_are_fine() -> None:
    SamplingParams()
    SamplingParams(max_tokens=None, seed=None, logprobs=None)
    SamplingParams(max_tokens=0, temperature=0, top_p=0, top_k=-1, min_p=0, logprobs=0)
    SamplingParams(temperature=2, top_p=1.0, min_p=1, seed=-(2**63), logprobs=20)


def test_all_violations_are_told_together() -> None:
    with pytest.raises(RequestError, match=r"temperature: .* 5 was given; top_p: .* 7 was given"):
        SamplingParams(temperature=5, top_p=7)


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        RequestError, match=r"tempreature: unknown field\. Did you mean 'temperature'"
    ):
        SamplingParams(tempreature=1)


@pytest.mark.parametrize(
    ("prompt_ids", "fields", "parameter", "message"),
    [
        ([], {}, "prompt", "no tokens"),
        ([100], {}, "prompt", "100 is outside the vocabulary, 0 to 99"),
        ([-1], {}, "prompt", "-1 is outside the vocabulary"),
        ([1] * 33, {}, "prompt", "33 tokens leave no room .* of 32 tokens"),
        ([1] * 32, {}, "prompt", "32 tokens leave no room .* of 32 tokens"),
        ([1] * 30, {"max_tokens": 3}, "max_tokens", "30 tokens and max_tokens=3 .* max_tokens=2"),
        ([1], {"max_tokens": HUGE}, "max_tokens", "exceed the model's window of 32"),
        ([1], {"stop_token_ids": (100,)}, "stop_token_ids", "100 is outside the vocabulary"),
        ([1], {"logit_bias": {100: 1.0}}, "logit_bias", "100 is outside the vocabulary"),
        ([1], {"max_tokens": 2, "min_tokens": 3}, "min_tokens", "3 exceeds the longest answer, 2"),
        ([1], {"min_tokens": HUGE}, "min_tokens", "exceeds the longest answer, 31"),
        ([1], {"stop": ("a",)}, "stop", "decoder"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_with_the_numbers(
    prompt_ids: list[int], fields: dict[str, object], parameter: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_request(Request(prompt_ids, SamplingParams(**fields)), LIMITS)
    assert caught.value.parameter == parameter


def test_a_prompt_that_fills_the_window_may_be_read_but_not_answered() -> None:
    check_request(Request([1] * 32, SamplingParams(max_tokens=0)), LIMITS)
    check_request(Request([1] * 31, SamplingParams(max_tokens=1)), LIMITS)
