import math

import pytest
import torch

from herder.engine.request import SamplingParams
from herder.engine.sampler import (
    LOWEST_LOGPROB,
    TokenSampler,
    candidates,
    drawn,
    logprobs_of,
    penalized,
    warmed,
)
from herder.errors import ModelError

CPU = torch.device("cpu")


def sampler(
    prompt_ids: tuple[int, ...] = (1,),
    *,
    num_tokens: int = 8,
    end_ids: tuple[int, ...] = (),
    **fields: object,
) -> TokenSampler:
    params = SamplingParams(**fields)
    return TokenSampler(params, prompt_ids, num_tokens=num_tokens, end_ids=end_ids, device=CPU)


def left(logits: list[float], **filters: float) -> set[int]:
    """The ids that the filters leave."""
    kept = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    logits_C, ids_C = candidates(torch.tensor(logits), **kept)
    ids = range(len(logits)) if ids_C is None else ids_C.tolist()
    return {index for index, logit in zip(ids, logits_C.tolist(), strict=True) if logit > -math.inf}


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 0.65}, {1, 3}),
        ({"top_p": 0.75}, {1, 2, 3}),
        ({"top_p": 1e-4}, {1}),
        ({"top_p": 0.0}, {1}),
        ({"min_p": 0.45}, {1, 2, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.5}, {1, 3}),
        ({"min_p": 0.7, "top_p": 0.5}, {1}),
    ],
)
def test_filters_leave_the_tokens_of_their_definition(
    filters: dict[str, float], expected: set[int]
) -> None:
    assert left(LOGITS, **filters) == expected


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_top_p_of_a_large_vocabulary_equals_its_definition(top_p: float, spread: float) -> None:
    logits_V = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * spread
    ordered = logits_V.softmax(0).sort(descending=True)
    before = ordered.values.cumsum(0) - ordered.values
    expected = set(ordered.indices[before < top_p].tolist())
    # Sums of thousands of fp32 terms in another order may move the border by one token.
    assert len(left(logits_V.tolist(), top_p=top_p) ^ expected) <= 1


def test_draws_follow_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_C = torch.tensor([0.5, 0.3, 0.2]).log()
    counts = torch.zeros(3)
    for _ in range(3000):
        counts[drawn(logits_C, generator)] += 1
    # Three standard deviations of a share of 3,000 draws are under 0.028.
    assert torch.allclose(counts / 3000, torch.tensor([0.5, 0.3, 0.2]), atol=0.028)


def test_a_seed_repeats_its_draws_and_another_differs() -> None:
    logits_V = torch.zeros(1000)

    def draws(seed: int) -> list[int]:
        one = sampler(num_tokens=1000, seed=seed)
        return [one.choose(logits_V) for _ in range(8)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)


def test_a_seed_is_not_disturbed_by_a_neighbour() -> None:
    logits_V = torch.zeros(1000)
    alone, beside, neighbour = (sampler(num_tokens=1000, seed=seed) for seed in (5, 5, 9))
    expected = [alone.choose(logits_V) for _ in range(8)]
    mixed = []
    for _ in range(8):
        neighbour.choose(logits_V)
        torch.rand(3)
        mixed.append(beside.choose(logits_V))
    assert mixed == expected


def test_without_a_seed_two_requests_differ() -> None:
    first, second = sampler(num_tokens=1000), sampler(num_tokens=1000)
    logits_V = torch.zeros(1000)
    assert [first.choose(logits_V) for _ in range(8)] != [second.choose(logits_V) for _ in range(8)]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1e-4])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert sampler(temperature=temperature).choose(torch.tensor([0.0, 0.1, 0.2] + [0.0] * 5)) == 2


def test_extreme_logits_stay_finite_at_a_small_temperature() -> None:
    logits_V = torch.tensor([3e38, -3e38, 3e38, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert sampler(temperature=0.01, seed=0).choose(logits_V) in (0, 2)
    assert not warmed(logits_V / 2, 0.01).isnan().any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_ids_are_never_drawn(temperature: float) -> None:
    logits_W = torch.full((12,), 0.0)
    logits_W[8:] = 100.0
    one = sampler(temperature=temperature, seed=0)
    assert all(one.choose(logits_W) < 8 for _ in range(20))


def test_a_bias_moves_its_token_only() -> None:
    assert sampler(temperature=0, logit_bias={3: 5.0}).choose(torch.zeros(8)) == 3
    assert sampler(temperature=0, logit_bias={3: -100.0}).choose(torch.eye(8)[3] * 9) != 3


def test_ends_are_hidden_until_the_shortest_answer() -> None:
    one = sampler(temperature=0, min_tokens=2, end_ids=(4, 5))
    logits_V = torch.tensor([0.0, 0.0, 0.0, 1.0, 3.0, 2.0, 0.0, 0.0])
    assert [one.choose(logits_V) for _ in range(3)] == [3, 3, 4]


def test_repetition_counts_prompt_and_answer_the_others_the_answer_only() -> None:
    logits_V, seen_V = torch.tensor([2.0, -2.0, 2.0, 2.0]), torch.tensor([True, True, False, True])
    counts_V = torch.tensor([0.0, 0.0, 0.0, 2.0])
    repetition = SamplingParams(repetition_penalty=2.0)
    assert penalized(logits_V, repetition, counts_V, seen_V).tolist() == [1.0, -4.0, 2.0, 1.0]
    presence = SamplingParams(presence_penalty=0.5)
    assert penalized(logits_V, presence, counts_V, seen_V).tolist() == [2.0, -2.0, 2.0, 1.5]
    frequency = SamplingParams(frequency_penalty=0.5)
    assert penalized(logits_V, frequency, counts_V, seen_V).tolist() == [2.0, -2.0, 2.0, 1.0]


def test_penalties_follow_the_tokens_that_were_made() -> None:
    one = sampler((2,), temperature=0, frequency_penalty=2.0)
    logits_V = torch.tensor([5.0, 4.0, 4.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert [one.choose(logits_V) for _ in range(4)] == [0, 2, 1, 0]


def test_logprobs_are_those_of_the_whole_width() -> None:
    logits_W = torch.tensor([1.0, 2.0, 3.0, 9.0])
    scored = logprobs_of(logits_W, 0, num_tokens=3, num_top=2)
    expected = logits_W.log_softmax(0).tolist()
    assert scored.chosen.logprob == pytest.approx(expected[0])
    assert [top.token_id for top in scored.top] == [2, 1]
    assert [top.logprob for top in scored.top] == pytest.approx([expected[2], expected[1]])


def test_more_alternatives_than_tokens_and_an_impossible_token_are_told_in_numbers() -> None:
    scored = logprobs_of(torch.tensor([0.0, -math.inf]), 1, num_tokens=2, num_top=20)
    assert scored.chosen.logprob == LOWEST_LOGPROB
    assert [top.logprob for top in scored.top] == [0.0, LOWEST_LOGPROB]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_best_token_are_an_error_not_a_token(
    bad: float, temperature: float
) -> None:
    with pytest.raises(ModelError, match=r"no token can be drawn\. The weights"):
        sampler(temperature=temperature).choose(torch.full((8,), bad))
