"""What tests of serving share: answers made without a thread, the books checked at each step."""

from __future__ import annotations

from dataclasses import dataclass

from herder.engine.request import Event, Finished, Request, TokenMade
from herder.engine.runner import Runner
from herder.engine.scheduler import Scheduler


@dataclass
class Answer:
    """What became of one prompt."""

    events: list[Event]

    @property
    def ids(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenMade)]

    @property
    def text(self) -> str:
        parts = [event for event in self.events if isinstance(event, TokenMade | Finished)]
        return "".join(part.text for part in parts)

    @property
    def last(self) -> Finished:
        assert isinstance(self.events[-1], Finished), self.events[-1]
        return self.events[-1]


def run(runner: Runner, *requests: Request, scheduler: Scheduler | None = None) -> list[Answer]:
    """The answers to requests that came at once, made in the test's own thread."""
    scheduler = scheduler or scheduler_of(runner)
    jobs = [runner.begin(request) for request in requests]
    scheduler.waiting.extend(jobs)
    told: dict[object, list[Event]] = {job: [] for job in jobs}
    while scheduler.running or scheduler.waiting:
        parts = scheduler.next_parts()
        for part, events in zip(parts, runner.step(parts), strict=True):
            told[part.job] += events
            scheduler.advance(part)
            if events and isinstance(events[-1], Finished):
                scheduler.remove(part.job)
        check_books(scheduler)
    check_idle(scheduler)
    return [Answer(told[job]) for job in jobs]


def scheduler_of(runner: Runner) -> Scheduler:
    """What an engine makes of a runner."""
    config = runner.config
    return Scheduler(
        runner.blocks(),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        caches_prefixes=config.prefix_caching,
    )


def check_books(scheduler: Scheduler) -> None:
    """Every block is in one state, and as many are referenced as somebody holds."""
    for group, pool in enumerate(scheduler.blocks.pools):
        assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_blocks
        tables = [job.held for job in scheduler.running]
        held = {block for t in tables for block in t.blocks[group][t.first_held[group] :]}
        assert pool.num_referenced == len(held)


def check_idle(scheduler: Scheduler) -> None:
    """Nothing runs or waits, and every block is free or kept for others."""
    assert (list(scheduler.running), list(scheduler.waiting)) == ([], [])
    for pool in scheduler.blocks.pools:
        assert pool.num_referenced == 0
        assert pool.num_free + pool.num_cached == pool.num_blocks
