"""A run that leaps is judged broken; one that learns, warms up or is noisy is not."""

from __future__ import annotations

import random

import pytest

from herder.config.run import JudgeConfig
from herder.observe.events import RouterStats, StepFinished
from herder.train.judge import Judge


def step_at(step: int, loss: float, gradient_norm: float = 1.0) -> StepFinished:
    return StepFinished(
        step=step,
        loss=loss,
        gradient_norm=gradient_norm,
        learning_rate=1e-3,
        tokens=1,
        seconds=1.0,
        tokens_per_second=1.0,
        model_flops_utilization=None,
        peak_memory_bytes=1,
        seconds_left=0.0,
    )


def routers(
    *counts: int, dominant: tuple[int, ...] = (), dead: tuple[int, ...] = ()
) -> RouterStats:
    return RouterStats(
        step=1,
        layer=3,
        tokens=sum(counts),
        selections=counts,
        imbalance=1.0,
        entropy=1.0,
        max_entropy=1.0,
        dead=dead,
        dominant=dominant,
        dropped_tokens=0,
    )


def settled(num_steps: int = 30, **config: float | None) -> Judge:
    """After steps whose loss goes down and whose norm is noisy; none of them was alarming."""
    chance, judge = random.Random(0), Judge(JudgeConfig.model_validate(config))
    for step in range(1, num_steps + 1):
        loss = 2 + 3 / step + chance.gauss(0, 0.05)
        judge.look(step_at(step, loss, chance.lognormvariate(0, 0.4)))
        assert judge.tainted is None
    return judge


def test_a_run_that_learns_is_never_judged_broken() -> None:
    settled(2_000)


@pytest.mark.parametrize(
    ("loss", "norm", "named"), [(7.0, 1.0, "loss 7 at step 31"), (2.1, 60.0, "gradient norm 60 at")]
)
def test_a_leap_taints_the_step_and_the_two_after_it(loss: float, norm: float, named: str) -> None:
    judge = settled()
    judge.look(step_at(31, loss, norm))
    for step in (31, 32, 33):
        assert judge.tainted is not None
        assert judge.tainted.startswith(named)
        assert "deviations over the median" in judge.tainted
        judge.look(step_at(step + 1, 2.1))
    assert judge.tainted is None


def test_a_run_that_stays_broken_stays_tainted_however_long_it_lasts() -> None:
    judge = settled()
    for step in range(31, 400):
        judge.look(step_at(step, 6.5))
        assert judge.tainted is not None


def test_nothing_is_judged_before_enough_steps_and_what_is_off_is_off() -> None:
    judge = settled(19)
    judge.look(step_at(20, 50.0, 500.0))
    assert judge.tainted is None
    judge = settled(loss_deviations=None, gradient_deviations=None)
    judge.look(step_at(31, 50.0, 500.0))
    assert judge.tainted is None
    with pytest.raises(ValueError, match="a window never holds that many"):
        JudgeConfig(window_steps=5)


WELL = [routers(5, 5, 5, 5, dead=(1,))]
ONE_TAKES_ALL = [routers(5, 5, 5, 5), routers(95, 3, 2, 0, dominant=(0,))]
HALF_UNUSED = [routers(10, 10, 0, 0, dead=(2, 3))]


def route(judge: Judge, steps: range, told: list[RouterStats]) -> list[bool]:
    """Whether the run was tainted after each of these steps, in which routers did this."""
    tainted = []
    for step in steps:
        judge.look(step_at(step, 2.1))
        judge.look_at_routers(told)
        tainted.append(judge.tainted is not None)
    return tainted


@pytest.mark.parametrize("broken", [ONE_TAKES_ALL, HALF_UNUSED])
def test_routers_that_were_well_and_then_collapse_for_long_taint_until_they_are_well_again(
    broken: list[RouterStats],
) -> None:
    judge = settled()
    assert not any(route(judge, range(31, 60), WELL))
    assert route(judge, range(60, 90), broken) == [False] * 20 + [True] * 10
    assert judge.tainted is not None
    assert judge.tainted.startswith("routers collapsed: layer 3: ")
    assert not any(route(judge, range(90, 92), WELL))


def test_routers_that_begin_with_a_few_experts_taking_all_are_not_judged() -> None:
    judge = settled()
    assert not any(route(judge, range(31, 80), ONE_TAKES_ALL))
    assert not any(route(judge, range(80, 82), WELL))
    assert not any(route(judge, range(82, 120), ONE_TAKES_ALL))
    off = settled(routers=False)
    route(off, range(31, 60), WELL)
    assert not any(route(off, range(60, 90), ONE_TAKES_ALL))
