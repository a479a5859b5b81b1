"""Layouts given by hand: what their degrees make of a cluster, or why that cannot be.

Owns the refusals and what each says would do. Whether a layout fits is not looked at here.
"""

from __future__ import annotations

from herder.config.run import LayoutConfig
from herder.errors import PlanError
from herder.plan.candidate import Request
from herder.plan.layout import (
    Layout,
    ZeroStage,
    context_method,
    divisors,
    legal_expert_degrees,
    legal_tensor_degrees,
    make_layout,
    sequence_multiple,
    tensor_degree_problem,
)


def given_layouts(request: Request, given: LayoutConfig) -> list[Layout]:
    """The layout that degrees given by hand make, at each ZeRO stage that may be tried, lowest
    first. Raises PlanError with legal degrees when they are not.
    """
    architecture, cluster, model = request.sizes.architecture, request.cluster, request.model
    tp, pp = given.tensor_parallel_size, given.pipeline_parallel_size
    cp, ep = given.context_parallel_size, given.expert_parallel_size
    problem = tensor_degree_problem(architecture, tp, copies_kv_heads=True)
    if problem is not None:
        legal = ", ".join(map(str, legal_tensor_degrees(architecture, cluster)))
        raise PlanError(
            f"layout: tensor_parallel_size={tp} {problem} ({model}).\n"
            f"Legal on this cluster: {legal}. Leave layout: auto to have one chosen."
        )
    if pp > architecture.num_layers:
        raise PlanError(
            f"layout: pipeline_parallel_size={pp} exceeds the {architecture.num_layers} layers of "
            f"{model}. At most one stage a layer is possible."
        )
    dp, rest = divmod(cluster.num_gpus, tp * pp * cp)
    if rest:
        raise PlanError(
            f"layout: tensor_parallel_size x pipeline_parallel_size x context_parallel_size = "
            f"{tp} x {pp} x {cp} = {tp * pp * cp} does not divide the cluster's "
            f"{cluster.num_gpus} devices ({cluster.nodes} x {cluster.gpus_per_node})."
        )
    copies = given.data_parallel_replicas
    _check_copies(given, dp, cp)
    legal_experts = legal_expert_degrees(architecture, dp // copies * cp)
    if ep not in legal_experts:
        raise PlanError(
            f"layout: expert_parallel_size={ep} must divide the experts of {model} and the "
            f"{dp // copies * cp} ranks that share a copy of its state. Legal here: "
            f"{', '.join(map(str, legal_experts))}."
        )
    stages: tuple[ZeroStage, ...] = (1, 2, 3) if dp * cp > 1 else (0,)
    if given.zero_stage is not None:
        stages = (given.zero_stage,)
    degrees = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, "copies": copies}
    layouts = [make_layout(**degrees, zero_stage=stage) for stage in stages]
    _check_sequences(request, layouts[0])
    context_method(architecture, layouts[0], given.context_method)
    return layouts


def _check_sequences(request: Request, layout: Layout) -> None:
    """Refuse sequences that ranks cannot have equal parts of."""
    length, multiple = request.train.sequence_length, sequence_multiple(layout)
    if length % multiple:
        tp, cp = layout.tensor_parallel_size, layout.context_parallel_size
        of = f"tensor_parallel_size={tp}"
        of += f" x 2 x context_parallel_size={cp} = {multiple}" if cp > 1 else ""
        raise PlanError(
            f"layout: {of} parts of a sequence must have equally many tokens, and "
            f"train.sequence_length={length} is no multiple of {multiple}.\n"
            f"Try --set train.sequence_length={-(-length // multiple) * multiple}."
        )


def _check_copies(given: LayoutConfig, dp: int, cp: int) -> None:
    """Refuse copies that the data-parallel ranks cannot be divided into, or that share nothing:
    context-parallel ranks share one copy.
    """
    copies = given.data_parallel_replicas
    if copies == 1:
        return
    where = f"layout: data_parallel_replicas={copies}"
    if given.zero_stage == 0:
        raise PlanError(
            f"{where} goes with ZeRO 1 to 3: zero_stage=0 keeps a copy on every one of the {dp} "
            "data-parallel ranks. Leave data_parallel_replicas out, or set zero_stage: 1 or more."
        )
    legal = [number for number in divisors(dp) if number < dp * cp]
    if copies not in legal:
        options = ", ".join(map(str, legal)) or "1"
        raise PlanError(
            f"{where} must divide the {dp} data-parallel ranks into groups of two or more. "
            f"Legal here: {options}."
        )
