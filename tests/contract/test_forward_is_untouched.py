"""The headline claim, made executable: no layout touches a forward.

After `apply` every module is still an instance of its class, with that class' forward and call,
none of its own, and its plain attributes as they were. What a hook does to values only the laws
can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from herder.checkpoint.quantizing import is_quantized
from herder.config.architecture import ArchitectureConfig
from herder.config.catalog import debug_model_names, model_config_json
from herder.config.quantization import WeightQuantization
from herder.errors import PlanError
from herder.families.registry import architecture_from_hf
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.decoder import Decoder
from herder.model.quantized_weight import quantized
from herder.parallel.apply import apply
from herder.parallel.mesh import build_mesh
from herder.parallel.recompute import apply_recompute
from herder.plan.training import TrainingPlan
from herder.train.shrink import shrunk
from herder.train.verify_layouts import VerifyLayout, every_layout, plan_layout

SEAMS = frozenset({"dispatch"})
"""Plain attributes that a layout may replace: how tokens reach experts."""
ENDS = frozenset({"embed", "norm", "head"})
"""What a pipeline stage may lack, beside the layers of others."""


@dataclass(frozen=True)
class Before:
    """A module before anything was done to it."""

    kind: type[nn.Module]
    forward: Callable[..., Any]
    call: Callable[..., Any]
    plain: dict[str, object]


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """What stands in a module's own dict, but for torch's books and its mode."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
    }


def look(decoder: Decoder) -> dict[str, Before]:
    return {
        name: Before(
            type(module), type(module).forward, type(module).__call__, plain_attributes(module)
        )
        for name, module in decoder.named_modules()
    }


def touched(decoder: Decoder, before: dict[str, Before], *, is_stage: bool) -> list[str]:
    """What is not as it was, by module; empty when the claim holds."""
    found = []
    after = dict(decoder.named_modules())
    for name in after.keys() - before.keys():
        found.append(f"{name}: a new module")
    for name in before.keys() - after.keys():
        if not (is_stage and (name.split(".")[0] in ENDS or name.startswith("layers."))):
            found.append(f"{name}: gone")
    for name, was in before.items():
        module = after.get(name)
        if module is None:
            continue
        if not isinstance(module, was.kind):
            found.append(f"{name}: a {type(module).__name__}, no {was.kind.__name__}")
        if type(module).forward is not was.forward or "forward" in vars(module):
            found.append(f"{name}: another forward")
        if type(module).__call__ is not was.call or "__call__" in vars(module):
            found.append(f"{name}: another call")
        now = plain_attributes(module)
        allowed = SEAMS | (ENDS if is_stage and not name else frozenset())
        changed = [
            key
            for key in now.keys() | was.plain.keys()
            if key not in allowed and now.get(key) is not was.plain.get(key)
        ]
        found += [f"{name}: {key} is another" for key in changed]
    return found


def small(name: str) -> ArchitectureConfig:
    return shrunk(architecture_from_hf(model_config_json(name), name=name))


@pytest.fixture
def as_rank() -> Iterator[Callable[[int, int], None]]:
    """Makes this process one rank of many that nobody else is: enough for what only wraps."""

    def join(rank: int, num_ranks: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def applied(decoder: Decoder, plan: TrainingPlan, *, compiled: bool = False) -> None:
    mesh = build_mesh(plan.mesh_axes, "cpu")
    apply(decoder, plan, mesh, device=torch.device("meta"), compiled=compiled)


QUICK = ("fsdp=2,zero=3", "tp=4", "dp=2,tp=2,pp=2", "cp=4", "fsdp=2,cp=2,tp=2,ep=4")
CELLS = [
    pytest.param(name, layout, marks=[] if is_quick else [pytest.mark.full], id=f"{name} {text}")
    for name in debug_model_names()
    for layout in every_layout(has_experts=name == "moe-debug")
    if (text := layout.text)
    for is_quick in [name == "llama-debug" or text in QUICK]
    if layout.num_ranks > 1  # one process has no mesh; recompute alone is below
]


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_a_layout_leaves_every_module_as_it_is(
    name: str, layout: VerifyLayout, as_rank: Callable[[int, int], None]
) -> None:
    architecture = small(name)
    try:
        plan = plan_layout(architecture, layout)
    except PlanError as error:
        pytest.skip(str(error))  # what is refused is never applied
    decoder = build_decoder(architecture)
    before = look(decoder)
    as_rank(layout.num_ranks - 1, layout.num_ranks)
    applied(decoder, plan)
    assert touched(decoder, before, is_stage=layout.degrees["pp"] > 1) == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_recompute_and_compile_leave_every_module_as_it_is(
    as_rank: Callable[[int, int], None],
) -> None:
    architecture = small("llama-debug")
    (layout,) = (
        each for each in every_layout() if each.text == "fsdp=2,zero=1,tp=2,pp=2,recompute=full"
    )
    decoder = build_decoder(architecture)
    before = look(decoder)
    as_rank(0, layout.num_ranks)
    plan = plan_layout(architecture, layout)
    assert plan.recompute == "full"
    applied(decoder, plan, compiled=True)
    assert touched(decoder, before, is_stage=True) == []


def test_quantized_weights_leave_every_module_as_it_is() -> None:
    decoder = build_decoder(small("moe-debug"))
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=0)
    before = look(decoder)
    quantized_modules = [module for module in decoder.modules() if is_quantized(module)]
    for module in quantized_modules:
        weight = module.get_parameter("weight").detach()
        setattr(module, "weight", quantized(weight, WeightQuantization("int4")))  # noqa: B010
    assert quantized_modules
    assert touched(decoder, before, is_stage=False) == []


def own_forward(decoder: Decoder) -> None:
    layer = decoder.layers["0"]
    setattr(layer, "forward", layer.forward)  # noqa: B010


def other_class(decoder: Decoder) -> None:
    assert decoder.norm is not None
    decoder.norm = nn.LayerNorm(decoder.config.hidden_size)  # type: ignore[assignment]


def other_number(decoder: Decoder) -> None:
    decoder.layers.get_submodule("0.attention").head_dim = 4  # type: ignore[assignment]


def wrapper(decoder: Decoder) -> None:
    decoder.layers["0"] = nn.Sequential(decoder.layers["0"])


def missing(decoder: Decoder) -> None:
    del decoder.layers["1"]


@pytest.mark.parametrize("change", [own_forward, other_class, other_number, wrapper, missing])
def test_what_touches_a_module_is_seen(change: Callable[[Decoder], None]) -> None:
    decoder = build_decoder(small("llama-debug"))
    before = look(decoder)
    apply_recompute(decoder.layers, "full")
    assert touched(decoder, before, is_stage=False) == []
    change(decoder)
    assert touched(decoder, before, is_stage=False) != []
