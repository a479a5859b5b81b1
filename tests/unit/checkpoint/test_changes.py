"""What a run goes on with that it was not made with: each difference told with its effect."""

from __future__ import annotations

from typing import Any

import pytest

from herder.checkpoint.changes import explain_changes
from herder.checkpoint.metadata import ExperimentMeta
from tests.tiny import meta_at

LAYOUT = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 4,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
    "zero_stage": 1,
}
PLAN: dict[str, Any] = {
    "cluster": {"gpu": {"name": "h100-80gb", "kind": "gpu"}},
    "layout": LAYOUT,
    "precision": {"gradients": "bf16"},
}
FIELDS: dict[str, Any] = {
    "plan": PLAN,
    "config": {"train": {"steps": 10, "compile": False}, "serve": {"port": 1}, "layout": "auto"},
    "git_commit": "a" * 40,
    "versions": {"torch": "2.11.0", "safetensors": "0.4", "herder": "0.1.0"},
    "hardware": {"cpu": "Xeon", "num_cores": 2, "gpus": ["H100"] * 8, "driver": "1"},
}


def meta(**fields: Any) -> ExperimentMeta:
    return meta_at(3, {}).model_copy(update=FIELDS | fields)


def test_a_run_that_goes_on_as_it_was_has_nothing_to_tell() -> None:
    assert explain_changes(meta(), meta()) == []


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"versions": FIELDS["versions"] | {"torch": "2.13.0"}},
            "torch 2.11.0 -> 2.13.0: rounding may differ",
        ),
        (
            {"versions": FIELDS["versions"] | {"safetensors": "0.5"}},
            "safetensors 0.4 -> 0.5: changes no results",
        ),
        (
            {"git_commit": "b" * 40 + "+changes.1234"},
            "herder commit aaaaaaaaaa -> bbbbbbbbbb+changes.1234: what a step computes may have",
        ),
        ({"git_commit": None}, "herder commit aaaaaaaaaa -> unknown: "),
        (
            {"plan": PLAN | {"layout": LAYOUT | {"data_parallel_size": 3}}},
            "4 x h100-80gb (DP 4, ZeRO-1) -> 3 x h100-80gb (DP 3, ZeRO-1): the same batches in the "
            "same order, sums in another order",
        ),
        (
            {"plan": PLAN | {"cluster": {"gpu": {"name": "h200", "kind": "gpu"}}}},
            "4 x h100-80gb -> 4 x h200: rounding may differ",
        ),
        (
            {"plan": PLAN | {"precision": {"gradients": "fp32"}}},
            "precision of gradients bf16 -> fp32: rounding may differ",
        ),
        (
            {"hardware": FIELDS["hardware"] | {"gpus": ["H200"] * 8}},
            "gpus H100 -> H200: rounding may differ",
        ),
        (
            {"hardware": FIELDS["hardware"] | {"num_cores": 8}},
            "num_cores 2 -> 8: changes no results",
        ),
        (
            {"config": FIELDS["config"] | {"train": {"steps": 20, "compile": False}}},
            "train.steps 10 -> 20: the learning rate follows the new length",
        ),
        (
            {"config": FIELDS["config"] | {"train": {"steps": 10, "compile": True}}},
            "train.compile False -> True: rounding may differ",
        ),
        (
            {"config": FIELDS["config"] | {"serve": {"port": 2}}},
            "serve.port 1 -> 2: changes no results",
        ),
    ],
)
def test_each_difference_is_told_with_what_it_does(fields: dict[str, Any], line: str) -> None:
    (told,) = explain_changes(meta(), meta(**fields))
    assert told.startswith(line)


def test_differences_of_one_effect_share_a_line() -> None:
    versions = {"torch": "2.13.0", "safetensors": "0.5", "herder": "0.1.0"}
    hardware = FIELDS["hardware"] | {"driver": "2"}
    told = explain_changes(meta(), meta(versions=versions, hardware=hardware))
    assert [line.split(": ")[0] for line in told] == [
        "safetensors 0.4 -> 0.5",
        "torch 2.11.0 -> 2.13.0, driver 1 -> 2",
    ]


def test_a_cpus_cores_change_the_rounding_of_what_it_computes() -> None:
    on_cpu = PLAN | {"cluster": {"gpu": {"name": "cpu", "kind": "cpu"}}}
    more = FIELDS["hardware"] | {"num_cores": 8}
    (told,) = explain_changes(meta(plan=on_cpu), meta(plan=on_cpu, hardware=more))
    assert told.startswith("num_cores 2 -> 8: rounding may differ")


def test_what_an_older_version_did_not_write_down_is_not_compared() -> None:
    assert explain_changes(meta(hardware={}, versions={}, plan={}), meta()) == []
