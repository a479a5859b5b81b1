from __future__ import annotations

import pytest

from herder.config.run import ClusterConfig
from herder.plan.reliability import expected_goodput, plan_reliability, young_daly_interval

HOUR = 3600.0


def test_the_young_daly_interval_loses_least() -> None:
    save, mtbf = 30.0, 10 * HOUR

    def goodput(interval: float) -> float:
        return expected_goodput(
            interval_seconds=interval, save_seconds=save, restart_seconds=600.0, mtbf_seconds=mtbf
        )

    best = young_daly_interval(save, mtbf)
    tried = [best * factor for factor in (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)]
    assert max(tried, key=goodput) == pytest.approx(best)


def test_llama_3_keeps_over_nine_tenths_of_its_time_on_16384_gpus() -> None:
    cluster = ClusterConfig(nodes=2048, gpus_per_node=8)
    found = plan_reliability(405_853_388_800, cluster, step_seconds=12.0)
    failures = 54 * 24 / found.mean_time_between_failures_hours
    assert failures == pytest.approx(419, rel=0.01)
    assert 0.9 < found.goodput < 0.99


def test_opt_175b_restarts_about_a_hundred_times_in_two_months() -> None:
    # 992 A100s were 124 nodes; their own failure rate, not the default one, is what they met.
    cluster = ClusterConfig(nodes=124, gpus_per_node=8, gpu="a100-80gb", node_mtbf_hours=1700.0)
    found = plan_reliability(175_000_000_000, cluster, step_seconds=30.0)
    assert 60 * 24 / found.mean_time_between_failures_hours == pytest.approx(105, rel=0.02)
    assert found.goodput > 0.9


def test_a_measured_save_replaces_the_estimate() -> None:
    cluster = ClusterConfig(nodes=16, gpus_per_node=8)
    slow, fast = (
        plan_reliability(10**10, cluster, step_seconds=1.0, measured_save_seconds=s)
        for s in (100.0, 1.0)
    )
    assert slow.save_seconds == 100.0
    assert slow.checkpoint_interval_seconds == pytest.approx(
        10 * fast.checkpoint_interval_seconds, rel=0.01
    )
    assert slow.goodput < fast.goodput


def test_intervals_are_whole_steps_and_at_least_one() -> None:
    found = plan_reliability(10**9, ClusterConfig(nodes=4096), step_seconds=10_000.0)
    assert found.checkpoint_interval_steps == 1
    assert found.checkpoint_interval_seconds == 10_000.0


def test_failures_faster_than_restarts_leave_nothing() -> None:
    worst = expected_goodput(
        interval_seconds=10.0, save_seconds=1.0, restart_seconds=600.0, mtbf_seconds=100.0
    )
    assert worst == 0.0
