"""Sharded equals unsharded, loss by loss and gradient by gradient, for every axis and pair of axes.

The check is `herder verify`'s own. Each model's list is one test, since its layouts share the run
in one process that they are held against.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from herder.config.architecture import ArchitectureConfig, NoiseConfig
from herder.config.catalog import debug_model_names, model_config_json
from herder.families.registry import architecture_from_hf
from herder.train.shrink import shrunk
from herder.train.verify import verify
from herder.train.verify_layouts import parse_layouts
from herder.train.verify_report import Report, report_notes

QUICK = {
    "llama-debug": [
        *("dp=2", "fsdp=2,zero=1", "fsdp=2,zero=2", "tp=4", "pp=2,schedule=1f1b"),
        *("pp=2,schedule=zero_bubble", "fsdp=2,zero=1,tp=2,pp=2,recompute=full"),
    ],
    "moe-debug": [
        *("fsdp=2,cp=2", "pp=2,schedule=gpipe", "dp=2,tp=2,ep=2", "fsdp=2,pp=2,cp=2,ep=2"),
    ],
    "mla-debug": ["fsdp=2,tp=2", "pp=2,schedule=interleaved_1f1b", "cp=2"],
    "sliding-window-debug": ["tp=2,pp=2", "cp=2,context=ring"],
    "llama4-debug": ["fsdp=2,zero=1,tp=2", "pp=4", "fsdp=2,cp=2,context=ring,ep=2"],
}
OTHERS = {
    "gpt-oss-20b": ["fsdp=2,tp=4", "tp=2,pp=2"],  # sinks, biases of experts
    "olmoe-1b-7b-0924": ["tp=2", "fsdp=2,tp=2"],  # heads normed together
    "qwen2.5-0.5b": ["tp=2,pp=2"],  # seven query heads to one
    "deepseek-v2-lite": ["tp=4", "fsdp=2,pp=2"],  # queries without a latent
}


def small(name: str) -> ArchitectureConfig:
    return shrunk(architecture_from_hf(model_config_json(name), name=name))


def check(report: Report) -> None:
    told = "\n".join([f"{report.losses}", *report_notes(report), f"{report.cells}"])
    assert report.problem is None, told
    assert all(cell.max_relative_loss_difference is not None for cell in report.cells), told
    assert all(cell.max_relative_loss_difference < 1e-5 for cell in report.cells), told


@pytest.mark.parametrize(("name", "layouts"), QUICK.items())
def test_a_layout_trains_the_same_model(name: str, layouts: Sequence[str]) -> None:
    check(verify(small(name), parse_layouts(layouts), model=name, num_steps=5))


def test_router_noise_is_keyed_by_token_and_not_by_rank() -> None:
    architecture = small("moe-debug")
    assert architecture.moe is not None
    noisy = architecture.model_copy(
        update={
            "moe": architecture.moe.model_copy(
                update={"noise": NoiseConfig(std=0.5, decay_steps=100)}
            )
        }
    )
    layouts = parse_layouts(["dp=2", "tp=2", "pp=2", "cp=2"])
    report = verify(noisy, layouts, model="noisy", num_steps=4)
    quiet = verify(architecture, [], model="quiet", num_steps=4)
    check(report)
    assert report.losses[0] != quiet.losses[0], "noise that changes nothing proves nothing"


@pytest.mark.full
@pytest.mark.parametrize("name", debug_model_names())
def test_every_layout_trains_the_same_model(name: str) -> None:
    model = small(name)
    layouts = parse_layouts(["all"], has_experts=model.moe is not None)
    report = verify(model, layouts, model=name, num_steps=10)
    run = [cell for cell in report.cells if cell.refused is None]
    check(Report(model=name, losses=report.losses, cells=tuple(run)))
    assert len(run) >= len(report.cells) - 5, report_notes(report)


@pytest.mark.full
@pytest.mark.parametrize(("name", "layouts"), OTHERS.items())
def test_a_published_model_shrunk_trains_the_same(name: str, layouts: Sequence[str]) -> None:
    check(verify(small(name), parse_layouts(layouts), model=name, num_steps=5))
