from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import Console

from herder.config.architecture import ArchitectureConfig
from herder.config.run import ClusterConfig
from herder.plan.serving import plan_serving
from herder.plan.table import StackedBar, serving_table, training_table
from herder.plan.training import plan_model_training

Published = Callable[[str], ArchitectureConfig]


def printed(what: object, width: int) -> list[str]:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(("name", "nodes"), [("llama-2-7b", 1), ("llama-3.1-405b", 2048)])
def test_a_training_plan_fits_the_terminal_and_keeps_its_figures(
    name: str, nodes: int, width: int, published: Published
) -> None:
    on = ClusterConfig(nodes=nodes, gpus_per_node=8, gpu="h100-80gb")
    plan = plan_model_training(published(name), on, model=name)
    lines = printed(training_table(plan), width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines), "something is cut off"
    text = " ".join(" ".join(lines).split())
    assert f"{plan.parameters:,}" in text
    assert plan.layout.told() in text
    assert plan.distribution_shape in text
    assert plan.layout_reason in text
    assert f"MFU {plan.model_flops_utilization:.1%}" in text
    for share in plan.modules:
        assert share.module.replace("_", "-") in text
    for entry in plan.rejected[:2]:
        assert entry.layout in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_serving_plan_fits_the_terminal(width: int, published: Published) -> None:
    on = ClusterConfig(nodes=1, gpus_per_node=8, gpu="h100-80gb")
    plan = plan_serving(published("llama-3.1-405b"), on, model="llama-3.1-405b")
    lines = printed(serving_table(plan), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "65 sequences of 8,192 tokens" in text
    assert "bf16 is a wall" in text


def test_a_bar_is_as_wide_as_its_parts_say() -> None:
    (line,) = printed(StackedBar({"a": 25.0, "b": 25.0, "c": 0.0}, 100.0), 40)
    assert line == "█" * 20 + "·" * 20


def test_a_bar_never_passes_the_console() -> None:
    (line,) = printed(StackedBar({"a": 70.0, "b": 70.0}, 100.0), 40)
    assert line == "█" * 40
