"""The learning rate: a pure function of the step that starts, peaks and ends where it should."""

import pytest

from herder.config.run import ScheduleConfig
from herder.errors import ConfigError
from herder.train.schedule import check_schedule, learning_rate

COSINE = ScheduleConfig(kind="cosine", warmup_steps=10, minimum_ratio=0.1)
WSD = ScheduleConfig(kind="wsd", warmup_steps=10, decay_steps=20, minimum_ratio=0.0)
CONSTANT = ScheduleConfig(kind="constant", warmup_steps=4)


def rates(schedule: ScheduleConfig, steps: int = 100) -> list[float]:
    return [learning_rate(step, schedule, peak=1.0, steps=steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", [COSINE, WSD, CONSTANT])
def test_warm_up_rises_by_equal_parts_to_the_peak(schedule: ScheduleConfig) -> None:
    n = schedule.warmup_steps
    assert rates(schedule)[:n] == pytest.approx([(i + 1) / n for i in range(n)])


def test_cosine_is_half_way_in_the_middle_and_ends_at_its_minimum() -> None:
    schedule = ScheduleConfig(kind="cosine", warmup_steps=0, minimum_ratio=0.1)
    values = rates(schedule, steps=101)
    assert (values[0], values[50], values[100]) == pytest.approx((1.0, 0.55, 0.1))
    assert values == sorted(values, reverse=True)


def test_wsd_holds_its_peak_then_falls_in_a_line_to_the_minimum() -> None:
    values = rates(WSD)
    assert values[9:80] == [1.0] * 71
    assert values[80:] == pytest.approx([1 - k / 20 for k in range(1, 21)])


def test_constant_stays() -> None:
    assert set(rates(CONSTANT)[3:]) == {1.0}


@pytest.mark.parametrize("schedule", [COSINE, WSD])
def test_past_the_end_the_last_rate_holds(schedule: ScheduleConfig) -> None:
    last = learning_rate(99, schedule, peak=3e-4, steps=100)
    assert learning_rate(500, schedule, peak=3e-4, steps=100) == last


def test_a_run_of_one_step_has_a_rate() -> None:
    schedule = ScheduleConfig(kind="cosine")
    assert learning_rate(0, schedule, peak=2.0, steps=1) == 2.0


def test_a_schedule_longer_than_the_run_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps=10 \+ decay_steps=20 exceeds train.*=25"):
        check_schedule(WSD, steps=25)
    with pytest.raises(ConfigError, match=r"--set train\.steps=30 or more"):
        check_schedule(WSD, steps=5)
    check_schedule(WSD, steps=30)
