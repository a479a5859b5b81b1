"""Meters: rates over a window, from durations that are given or measured by a monotonic clock."""

import resource

import pytest

from herder.observe.meters import Stopwatch, Throughput, peak_process_bytes


def test_tokens_a_second_are_those_of_the_last_steps_only() -> None:
    meter = Throughput(flops_per_token=1e6, peak_flops_per_second=None, window_steps=2)
    for seconds in (100.0, 1.0, 3.0):
        meter.add(tokens=400, seconds=seconds)
    assert meter.tokens_per_second == pytest.approx(800 / 4)
    assert meter.seconds_for(10) == pytest.approx(20.0)


def test_utilization_is_the_models_flops_over_the_peak() -> None:
    meter = Throughput(flops_per_token=250e6, peak_flops_per_second=400e9)
    meter.add(tokens=1600, seconds=2.0)
    assert meter.model_flops_utilization == pytest.approx(800 * 250e6 / 400e9)


def test_without_a_peak_there_is_no_utilization_and_without_steps_no_rate() -> None:
    meter = Throughput(flops_per_token=1e6, peak_flops_per_second=None)
    assert (meter.tokens_per_second, meter.seconds_for(5)) == (0.0, 0.0)
    assert meter.model_flops_utilization is None


def test_a_stopwatch_splits_time_without_losing_any() -> None:
    whole, parts = Stopwatch(), Stopwatch()
    total = sum(parts.restart() for _ in range(5)) + parts.seconds()
    assert 0 < total <= whole.seconds()


def test_peak_memory_is_in_bytes() -> None:
    status_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak_process_bytes() >= status_kib
    assert 10e6 < peak_process_bytes() < 1e12
