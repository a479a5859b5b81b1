"""Which layouts `herder verify` tries: their short names, the full list, and a plan scaled down.

Owns the words `tp=2,pp=2` and their plans. Whether a layout is legal is the planner's to say, how
it is run is verify's. Imports no torch: a mistyped layout is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

from pydantic import ValidationError

from herder.config.architecture import ArchitectureConfig, GroupedQueryAttention
from herder.config.catalog import gpu
from herder.config.run import (
    ClusterConfig,
    ContextMethod,
    LayoutConfig,
    PipelineSchedule,
    TrainConfig,
)
from herder.errors import ConfigError, PlanError, close_match
from herder.plan.training import TrainingPlan, plan_training

MAX_RANKS = 8
SEQUENCE_LENGTH = 64
MIN_MICRO_BATCHES = 4
"""Of a step over all ranks."""
DEGREES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
"""dp copies what fsdp shards out; both read different micro-batches."""
SCHEDULES: tuple[str, ...] = get_args(PipelineSchedule)
_VALUES = {
    "zero": ("1", "2", "3"),
    "schedule": SCHEDULES,
    "context": get_args(ContextMethod),
    "recompute": ("none", "full"),
}
_AXES_OF = {"zero": ("fsdp", "cp"), "schedule": ("pp",), "context": ("cp",)}
"""Axes of which one must be split for a key to mean anything."""
_EXAMPLES = "tp=2,pp=2 or fsdp=2,zero=1"


@dataclass(frozen=True)
class VerifyLayout:
    """One layout to try, as it was asked for."""

    text: str
    degrees: Mapping[str, int]
    """Of each of DEGREES."""
    zero: Literal[1, 2, 3] | None = None
    schedule: PipelineSchedule | None = None
    context: ContextMethod | None = None
    recompute: Literal["none", "full"] = "none"

    @property
    def num_ranks(self) -> int:
        """Experts are spread over ranks that are there anyway."""
        return prod(degree for name, degree in self.degrees.items() if name != "ep")

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different micro-batches."""
        return self.degrees["dp"] * self.degrees["fsdp"]

    @property
    def num_micro_batches(self) -> int:
        """Of a step over all ranks: each that reads data has two, and one a stage, at least; of an
        odd number of them one has an empty one."""
        is_uneven = self.num_data_ranks > 1 and self.num_data_ranks % 2 == 1
        count = self.num_data_ranks * max(2, self.degrees["pp"]) - is_uneven
        return max(MIN_MICRO_BATCHES, count)


def parse_layout(text: str) -> VerifyLayout:
    """`fsdp=2,zero=1,tp=2` as a record. Raises ConfigError with a close match."""
    given = dict[str, str]()
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in (*DEGREES, *_VALUES):
            known = close_match(name, (*DEGREES, *_VALUES))
            problem = f"unknown key {name!r}" if equals else f"{part.strip()!r} is no key=value"
            raise ConfigError(f"--layouts {text}: {problem}. {known} For example {_EXAMPLES}.")
        if name in given:
            raise ConfigError(f"--layouts {text}: {name} is given twice.")
        _check_value(text, name, value)
        given[name] = value
    degrees = {name: int(given.get(name, 1)) for name in DEGREES}
    _refuse_lonely(text, given, degrees)
    values: dict[str, Any] = {
        name: given[name] for name in ("schedule", "context", "recompute") & given.keys()
    }
    if degrees["fsdp"] > 1 or "zero" in given:
        values["zero"] = int(given.get("zero", 3))
    return VerifyLayout(text=text, degrees=degrees, **values)


def _check_value(text: str, name: str, value: str) -> None:
    if name in DEGREES:
        if not value.isdecimal() or not int(value):
            raise ConfigError(f"--layouts {text}: {name} is a number of ranks, given {value!r}.")
    elif value not in _VALUES[name]:
        match = close_match(value, _VALUES[name])
        raise ConfigError(f"--layouts {text}: {name}={value} does not exist. {match}")


def _refuse_lonely(text: str, given: Mapping[str, str], degrees: Mapping[str, int]) -> None:
    """What says how an axis works means nothing without the axis."""
    for name, axes in _AXES_OF.items():
        if name in given and all(degrees[axis] == 1 for axis in axes):
            raise ConfigError(
                f"--layouts {text}: {name} is of {axes[0]}, which is not split here. "
                f"Add {axes[0]}=2, or leave {name} out."
            )


def every_layout(*, has_experts: bool = False) -> list[VerifyLayout]:
    """Every axis alone, in pairs, and in more that fill eight ranks.

    has_experts: of a model that has some to spread.
    """
    stages = [f"pp=2,schedule={schedule}" for schedule in SCHEDULES]
    alone = ["dp=2", *(f"fsdp=2,zero={stage}" for stage in (1, 2, 3)), "tp=2", "tp=4", *stages]
    pairs = [
        *("recompute=full", "fsdp=2,recompute=full", "tp=2,recompute=full"),
        *("dp=2,tp=2", "dp=2,fsdp=2,zero=1", "dp=2,fsdp=2"),
        *(f"fsdp=2,zero={stage},tp=2" for stage in (1, 2, 3)),
        *("pp=4", "dp=2,pp=2", "fsdp=2,zero=1,pp=2", "fsdp=2,pp=2"),
        *(f"tp=2,{each}" for each in stages),
    ]
    triples = [
        *("dp=2,tp=2,pp=2", "fsdp=2,zero=1,tp=2,pp=2", "fsdp=2,tp=2,pp=2"),
        *("dp=2,fsdp=2,tp=2", "dp=2,fsdp=2,pp=2", "fsdp=2,tp=4"),
        *("fsdp=2,zero=1,tp=2,pp=2,recompute=full", "dp=3", "fsdp=3,pp=2"),
    ]
    context = [
        *("cp=2,context=ring", "cp=2,context=ulysses", "cp=4,context=ring", "cp=4"),
        *("cp=2,recompute=full", "cp=2,context=ring,recompute=full"),
        *("cp=2,zero=3", "fsdp=2,zero=1,cp=2", "dp=2,cp=2", "dp=2,cp=2,zero=2"),
        *("tp=2,cp=2", "tp=2,cp=2,context=ring", "pp=2,cp=2", "pp=2,cp=2,context=ring"),
        *("fsdp=2,tp=2,cp=2", "tp=2,pp=2,cp=2", "fsdp=2,pp=2,cp=2,context=ring"),
    ]
    experts = [
        *("dp=2,ep=2", "dp=4,ep=2", "fsdp=4,ep=4", "fsdp=2,recompute=full,ep=2"),
        *(f"fsdp=4,zero={stage},ep=2" for stage in (1, 2, 3)),
        *("dp=2,fsdp=2,ep=2", "dp=2,tp=2,ep=2", "fsdp=2,tp=2,ep=2", "fsdp=4,tp=2,ep=2"),
        *("dp=2,pp=2,ep=2", "fsdp=2,pp=2,ep=2", "cp=2,ep=2", "fsdp=2,cp=2,ep=4"),
        *("fsdp=2,cp=2,context=ring,ep=2", "fsdp=2,tp=2,pp=2,ep=2", "cp=2,tp=2,pp=2,ep=2"),
        *("fsdp=2,cp=2,tp=2,ep=4", "fsdp=2,cp=2,pp=2,ep=2", "dp=2,fsdp=2,cp=2,ep=2"),
        *("cp=2,zero=3,tp=2,pp=2,ep=2", "cp=2,zero=1,context=ring,tp=2,pp=2,ep=2"),
    ]
    texts = (*alone, *pairs, *triples, *context, *(experts if has_experts else ()))
    return [parse_layout(text) for text in texts]


def parse_layouts(texts: Iterable[str], *, has_experts: bool = False) -> list[VerifyLayout]:
    """Layouts in the order given, each once; `all` stands for every one that the model may have."""
    found = dict[str, VerifyLayout]()
    for text in texts:
        is_all = text == "all"
        layouts = every_layout(has_experts=has_experts) if is_all else [parse_layout(text)]
        found.update((layout.text, layout) for layout in layouts)
    return list(found.values())


def plan_layout(architecture: ArchitectureConfig, layout: VerifyLayout) -> TrainingPlan:
    """The plan that is run. Raises PlanError with the reason where there is none."""
    degrees = layout.degrees
    if layout.num_ranks > MAX_RANKS:
        raise PlanError(f"{layout.num_ranks} ranks; at most {MAX_RANKS} are started here.")
    fields = {
        "tensor_parallel_size": degrees["tp"],
        "pipeline_parallel_size": degrees["pp"],
        "context_parallel_size": degrees["cp"],
        "expert_parallel_size": degrees["ep"],
        "zero_stage": layout.zero or 0,
        "data_parallel_replicas": degrees["dp"] if layout.zero else 1,
        "pipeline_schedule": layout.schedule or "auto",
        "context_method": layout.context or "auto",
    }
    try:
        given = LayoutConfig.model_validate(fields)
    except ValidationError as error:  # the record's own rules are the planner's too
        raise PlanError(error.errors()[0]["msg"]) from None
    tokens = layout.num_micro_batches * SEQUENCE_LENGTH
    plan = plan_training(
        architecture,
        ClusterConfig(nodes=1, gpus_per_node=layout.num_ranks, gpu=gpu("cpu")),
        TrainConfig(
            sequence_length=SEQUENCE_LENGTH,
            micro_batch_size=1,
            global_batch_tokens=tokens,
            precision="fp32",
            recompute=layout.recompute,
        ),
        given,
    )
    assert plan.global_batch_tokens == tokens, plan.adjustments
    return plan


def scaled_down(plan: TrainingPlan, architecture: ArchitectureConfig) -> tuple[VerifyLayout, str]:
    """(the plan's layout on few ranks, how it was made): which axes are split stays, as do the ZeRO
    stage, the schedule and recompute. `architecture` is the one that the plan is for."""
    layout = plan.layout
    replicas = layout.data_parallel_replicas if layout.zero_stage else layout.data_parallel_size
    sizes = {
        "dp": replicas,
        "fsdp": layout.data_parallel_size // replicas,
        "tp": layout.tensor_parallel_size,
        "pp": layout.pipeline_parallel_size,
        "cp": layout.context_parallel_size,
        "ep": layout.expert_parallel_size,
    }
    degrees = {name: 2 for name, size in sizes.items() if size > 1}
    if "tp" in degrees:  # the one degree that divides the model
        degrees["tp"] = _smallest_divisor(sizes["tp"])
    attention = architecture.attention
    grouped = isinstance(attention, GroupedQueryAttention)
    copies_heads = grouped and sizes["tp"] > attention.num_key_value_heads
    if copies_heads and prod(degrees.values()) * 2 <= MAX_RANKS:
        degrees["tp"] = 4
    words = [f"{name}={degree}" for name, degree in degrees.items()]
    if "fsdp" in degrees or ("cp" in degrees and layout.zero_stage):
        words.append(f"zero={layout.zero_stage}")
    if "pp" in degrees:
        words.append(f"schedule={plan.pipeline_schedule}")
    if "cp" in degrees:
        words.append(f"context={plan.context_method}")
    if plan.recompute == "full":
        words.append("recompute=full")
    small = parse_layout(",".join(words) or "dp=1")
    told = (
        f"The plan of {plan.model}: {layout.told()} on {layout.num_ranks:,} ranks. Run here as "
        f"{small.text} on {small.num_ranks}: every axis that is split stays so"
    )
    return small, told + (", by fewer ranks." if small.num_ranks < layout.num_ranks else ".")


def _smallest_divisor(number: int) -> int:
    return next(each for each in range(2, number + 1) if number % each == 0)
