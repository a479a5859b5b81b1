import threading
import time
from collections.abc import Callable

import pytest

from herder.engine.engine import Engine
from herder.engine.request import Event, Finished, Request, SamplingParams, TokenMade
from herder.engine.runner import Runner
from herder.errors import OverloadedError, RequestError, UnavailableError

LONG = Request([1, 2, 3], SamplingParams(max_tokens=90, seed=0))
SHORT = Request([4, 5], SamplingParams(max_tokens=4, seed=0))


Ask = Callable[[Request], object]


def unheard(_: Event) -> None:
    """A listener that does not care."""


class Gate:
    """A listener that holds the engine at the first token until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.reached.set()
        assert self.opened.wait(10)

    @property
    def last(self) -> Finished:
        assert isinstance(self.events[-1], Finished), self.events
        return self.events[-1]


@pytest.fixture
def gate(engine: Engine) -> Gate:
    """A running request that is held; the queue behind it is empty."""
    gate = Gate()
    engine.submit([(LONG, gate)])
    assert gate.reached.wait(10)
    yield gate
    gate.opened.set()


def test_a_prompt_is_answered_with_events_to_the_last(
    ask: Ask, answer: Callable[..., object], make_answer: type
) -> None:
    events = list(ask(Request([1, 2, 3], SamplingParams(max_tokens=5, seed=7))).events())
    assert make_answer(events).ids == answer([1, 2, 3], max_tokens=5, seed=7).ids
    assert [type(event) for event in events] == [TokenMade] * 5 + [Finished]
    assert events[-1].num_prompt_tokens == 3


def test_requests_are_answered_in_the_order_they_came(engine: Engine, ask: Ask, gate: Gate) -> None:
    order: list[int] = []

    def listener(index: int) -> Callable[[Event], None]:
        return lambda event: order.append(index) if isinstance(event, Finished) else None

    for index in range(8):
        engine.submit([(SHORT, listener(index))])
    assert (engine.num_running, engine.num_waiting) == (1, 8)
    gate.opened.set()
    assert engine.wait_idle(timeout_seconds=10)
    assert ask(SHORT).last().reason == "length"
    assert order == list(range(8))


def test_results_do_not_depend_on_neighbours(ask: Ask) -> None:
    requests = [
        Request([index + 1, 2, 3], SamplingParams(max_tokens=6 + index, seed=index))
        for index in range(8)
    ]
    alone = [list(ask(request).events()) for request in requests]
    together = [ask(request) for request in requests]
    assert [list(heard.events()) for heard in together] == alone


@pytest.mark.usefixtures("gate")
def test_a_full_queue_refuses_and_takes_none_of_a_group(engine: Engine) -> None:
    engine.submit([(SHORT, unheard)] * 6)
    with pytest.raises(OverloadedError, match="6 of 8 places are taken and this needs 3"):
        engine.submit([(SHORT, unheard)] * 3)
    assert engine.num_waiting == 6
    engine.submit([(SHORT, unheard)] * 2)


@pytest.mark.usefixtures("gate")
def test_a_bad_request_changes_nothing_for_the_others(engine: Engine) -> None:
    bad = Request([10_000], SamplingParams())
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.submit([(SHORT, unheard), (bad, unheard)])
    assert engine.num_waiting == 0


def test_a_running_request_ends_within_a_step_of_its_cancelling(engine: Engine) -> None:
    gate = Gate()
    (generation,) = engine.submit([(LONG, gate)])
    assert gate.reached.wait(10)
    engine.cancel(generation)
    gate.opened.set()
    assert engine.wait_idle(timeout_seconds=10)
    engine.close()
    assert gate.last.reason == "abort"
    assert gate.last.num_completion_tokens == sum(isinstance(e, TokenMade) for e in gate.events)
    assert len(gate.events) <= 3


@pytest.mark.usefixtures("gate")
def test_a_waiting_request_leaves_the_queue_at_once(engine: Engine) -> None:
    heard: list[Event] = []
    (generation,) = engine.submit([(SHORT, heard.append)])
    engine.cancel(generation)
    assert engine.num_waiting == 0
    assert [event.reason for event in heard if isinstance(event, Finished)] == ["abort"]


def test_cancelling_twice_or_after_the_end_tells_nothing_more(engine: Engine) -> None:
    heard: list[Event] = []
    (generation,) = engine.submit([(SHORT, heard.append)])
    assert engine.wait_idle(timeout_seconds=10)
    engine.cancel(generation)
    engine.cancel(generation)
    engine.close()
    assert [event.reason for event in heard if isinstance(event, Finished)] == ["length"]


def test_a_failure_of_one_request_is_its_own(ask: Ask) -> None:
    class Failing:
        def add(self, token_id: int) -> str:
            raise ValueError("no such text")

        def finish(self) -> str:
            return ""

    broken = ask(Request([1, 2], SamplingParams(max_tokens=3), Failing()))
    fine = ask(SHORT)
    failed = broken.last()
    assert (failed.reason, str(failed.error)) == ("error", "no such text")
    assert fine.last().reason == "length"


def test_a_listener_that_fails_ends_its_request_only(engine: Engine, ask: Ask) -> None:
    def gone(_: Event) -> None:
        raise RuntimeError("the loop is closed")

    engine.submit([(LONG, gone)])
    assert ask(SHORT).last().reason == "length"


def test_a_drained_engine_refuses_and_finishes_what_it_has(
    engine: Engine, ask: Ask, gate: Gate
) -> None:
    waiting = ask(SHORT)
    engine.drain()
    with pytest.raises(UnavailableError, match="shutting down"):
        ask(SHORT)
    assert not engine.wait_idle(timeout_seconds=0.01)
    gate.opened.set()
    assert waiting.last().reason == "length"


def test_closing_ends_what_is_left_with_an_error(engine: Engine, ask: Ask, gate: Gate) -> None:
    waiting = ask(SHORT)
    closing = threading.Thread(target=engine.close)
    closing.start()
    ended = waiting.last()
    gate.opened.set()
    closing.join(10)
    assert (ended.reason, type(ended.error)) == ("error", UnavailableError)
    assert (gate.last.reason, type(gate.last.error)) == ("error", UnavailableError)


def test_the_heartbeat_is_old_only_while_work_makes_no_progress(engine: Engine, gate: Gate) -> None:
    time.sleep(0.02)
    assert engine.stalled_seconds >= 0.02
    gate.opened.set()
    assert engine.wait_idle(timeout_seconds=10)
    assert engine.stalled_seconds == 0


def test_a_dead_thread_counts_as_stalled_for_ever(runner: Runner) -> None:
    engine = Engine(runner)
    assert engine.stalled_seconds == 0
    engine.close()
    assert engine.stalled_seconds == float("inf")


def test_many_threads_may_ask_at_once(ask: Ask) -> None:
    reasons: list[str] = []

    def hear() -> None:
        reasons.append(ask(SHORT).last().reason)

    threads = [threading.Thread(target=hear) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert reasons == ["length"] * 8
