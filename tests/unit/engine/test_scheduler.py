"""Whose turn it is: order, budgets, room, who gives way; and that all comes back."""

from __future__ import annotations

import random

import pytest

from herder.config.run import EngineConfig
from herder.engine.request import Finished, Request, SamplingParams
from herder.engine.runner import Runner
from herder.engine.scheduler import Job, Scheduler
from herder.errors import ConfigError
from herder.model.decoder import Decoder
from herder.units import GB
from tests.engine_runs import check_books, check_idle, run, scheduler_of
from tests.unit.engine.conftest import WINDOW_TOKENS, tiny_architecture


def runner_of(decoder: Decoder, **config: object) -> Runner:
    return Runner(
        decoder, window_tokens=WINDOW_TOKENS, eos_token_ids=(), config=EngineConfig(**config)
    )


def queue(runner: Runner, *lengths: int, scheduler: Scheduler, **fields: object) -> list[Job]:
    """Jobs of so many prompt tokens."""
    jobs = []
    for number, length in enumerate(lengths):
        ids = [(number + index) % 64 for index in range(length)]
        jobs.append(runner.begin(Request(ids, SamplingParams(seed=number, **fields))))
    scheduler.waiting.extend(jobs)
    return jobs


def step(runner: Runner, scheduler: Scheduler) -> dict[Job, int]:
    """One forward; how many tokens of each job it computed."""
    parts = scheduler.next_parts()
    for part, events in zip(parts, runner.step(parts), strict=True):
        scheduler.advance(part)
        if events and isinstance(events[-1], Finished):
            scheduler.remove(part.job)
    check_books(scheduler)
    return {part.job: part.num_tokens for part in parts}


def test_a_long_prompt_stalls_no_answer(decoder: Decoder) -> None:
    runner = runner_of(decoder, max_num_batched_tokens=16)
    scheduler = scheduler_of(runner)
    short, long, late = queue(runner, 3, 60, 5, scheduler=scheduler, max_tokens=20)
    assert step(runner, scheduler) == {short: 3, long: 13}
    assert step(runner, scheduler) == {short: 1, long: 15}
    assert step(runner, scheduler) == {short: 1, long: 15}
    assert step(runner, scheduler) == {short: 1, long: 15}
    assert step(runner, scheduler) == {short: 1, long: 2, late: 5}
    assert step(runner, scheduler) == {short: 1, long: 1, late: 1}


def test_no_more_run_than_may(decoder: Decoder) -> None:
    runner = runner_of(decoder, max_num_seqs=2)
    scheduler = scheduler_of(runner)
    one, two, three = queue(runner, 3, 3, 3, scheduler=scheduler, max_tokens=3)
    assert step(runner, scheduler).keys() == {one, two}
    scheduler.remove(one)
    assert step(runner, scheduler).keys() == {two, three}


def test_a_prompt_that_is_cached_whole_computes_its_last_token(decoder: Decoder) -> None:
    runner = runner_of(decoder, block_size=4)
    scheduler = scheduler_of(runner)
    request = Request(list(range(16)), SamplingParams(max_tokens=5, temperature=0))
    (first,) = run(runner, request, scheduler=scheduler)
    scheduler.waiting.append(runner.begin(request))
    (part,) = scheduler.next_parts()
    assert (part.start, part.num_tokens) == (12, 4)
    scheduler.remove(part.job)
    (again,) = run(runner, request, scheduler=scheduler)
    assert again.ids == first.ids
    assert (scheduler.num_tokens_looked_up, scheduler.num_tokens_found) == (48, 24)


def test_another_salt_finds_nothing(decoder: Decoder) -> None:
    runner = runner_of(decoder)
    scheduler = scheduler_of(runner)
    params = SamplingParams(max_tokens=3, temperature=0)
    for salt in (None, "a", "b"):
        run(runner, Request(list(range(40)), params, cache_salt=salt), scheduler=scheduler)
    assert scheduler.num_tokens_found == 0
    run(runner, Request(list(range(40)), params, cache_salt="a"), scheduler=scheduler)
    assert scheduler.num_tokens_found == 32


def small_pool(decoder: Decoder, windows: float, **config: object) -> Runner:
    """Room for so many whole windows."""
    one = runner_of(decoder, **{**config, "max_num_seqs": 1}).pages.num_bytes
    return runner_of(decoder, kv_cache_gb=windows * one / GB, **config)


def test_two_long_requests_in_a_pool_for_one_and_a_half_are_answered_as_alone(
    decoder: Decoder,
) -> None:
    params = SamplingParams(max_tokens=76, seed=1)
    requests = [Request([first] * 20, params) for first in (1, 2)]
    runner = small_pool(decoder, 1.5, prefix_caching=False)
    scheduler = scheduler_of(runner)
    together = run(runner, *requests, scheduler=scheduler)
    assert scheduler.num_preemptions > 0
    for request, answer in zip(requests, together, strict=True):
        assert answer.ids == run(runner, request)[0].ids
        assert answer.last.num_completion_tokens == 76


def test_the_oldest_gives_way_to_nobody(decoder: Decoder) -> None:
    runner = small_pool(decoder, 1.2)
    scheduler = scheduler_of(runner)
    oldest, *_ = queue(runner, 30, 30, 30, 30, scheduler=scheduler, max_tokens=60)
    while oldest in scheduler.running or oldest.is_new:
        assert oldest in step(runner, scheduler)
    order = [*scheduler.running, *scheduler.waiting]
    while scheduler.running or scheduler.waiting:
        step(runner, scheduler)
        left = [*scheduler.running, *scheduler.waiting]
        assert left == [job for job in order if job in left]
    assert scheduler.num_preemptions > 0
    check_idle(scheduler)


def test_a_cache_smaller_than_a_window_is_refused_with_what_would_do(decoder: Decoder) -> None:
    with pytest.raises(ConfigError, match=r"holds 64 tokens, but one sequence may have 96. Give"):
        small_pool(decoder, 0.7)
    small_pool(decoder, 1.0)


def test_layers_with_a_window_take_no_more_than_they_see(decoder: Decoder) -> None:
    """Of the two layers here one sees 8 tokens."""
    assert tiny_architecture().layers[1].window == 8
    runner = runner_of(decoder, max_num_seqs=1, max_num_batched_tokens=16)
    full, windowed = (pool.num_blocks for pool in runner.blocks().pools)
    assert (full, windowed) == (6, 3)
    (answer,) = run(runner, Request([1, 2, 3], SamplingParams(temperature=0)))
    assert answer.last.num_completion_tokens == 93


@pytest.mark.parametrize("windows", [1.5, 8])
def test_thousands_of_aborts_leave_no_block(decoder: Decoder, windows: float) -> None:
    draw = random.Random(0)
    runner = small_pool(decoder, windows, max_num_seqs=8)
    scheduler = scheduler_of(runner)
    for _ in range(1000):
        lengths = [draw.randint(1, 40) for _ in range(3)]
        queue(runner, *lengths, scheduler=scheduler, max_tokens=40)
        for _ in range(draw.randint(0, 1)):
            step(runner, scheduler)
        open_jobs = [*scheduler.running, *scheduler.waiting]
        for job in draw.sample(open_jobs, min(len(open_jobs), 3)):
            scheduler.remove(job)
    for job in [*scheduler.running, *scheduler.waiting]:
        scheduler.remove(job)
    check_idle(scheduler)
