"""`herder plan serve MODEL`. Composition only."""

from __future__ import annotations

import click

from herder.cli.models import resolve
from herder.cli.plan_options import COUNT, FiniteRange, cluster_options, print_plan
from herder.cli.quantization import quantization_options
from herder.config.detect import choose_cluster
from herder.config.quantization import GroupSize, QuantizationName, weight_quantization
from herder.families.registry import family_named
from herder.plan.serving import DEFAULT_UTILIZATION, plan_serving
from herder.plan.weight_format import published_format, quantized_format


@click.command("serve")
@click.argument("model")
@cluster_options
@click.option("--context", type=COUNT, help="Tokens a sequence.  [default: 8192, or the window]")
@click.option("--tensor-parallel", type=COUNT, help="GPUs a replica.  [default: fewest that do]")
@click.option(
    "--utilization",
    type=FiniteRange(min=0, max=1, min_open=True),
    default=DEFAULT_UTILIZATION,
    show_default=True,
    help="Share of a GPU's memory for weights and cache.",
)
@quantization_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def serve(
    model: str,
    nodes: int | None,
    gpus_per_node: int | None,
    gpu_name: str | None,
    context: int | None,
    tensor_parallel: int | None,
    utilization: float,
    quantization: QuantizationName | None,
    quantization_group_size: GroupSize | None,
    as_json: bool,
) -> None:
    """How to serve MODEL, and how many sequences of --context tokens it holds at once.

    \b
    herder plan serve llama-2-7b --gpu h100-80gb --tensor-parallel 8 --context 8192
    herder plan serve llama-3.1-405b --gpu h100-80gb --json
    """
    source = resolve(model, needs_weights=False)
    how = weight_quantization(quantization, quantization_group_size)
    rules = family_named(source.family).weight_rules(source.architecture)
    plan = plan_serving(
        source.architecture,
        choose_cluster(None, nodes=nodes, gpus_per_node=gpus_per_node, gpu_name=gpu_name),
        model=source.name,
        context_tokens=context,
        tensor_parallel_size=tensor_parallel,
        utilization=utilization,
        published=published_format(source.config_json, rules, where=source.name),
        given=None if how is None else quantized_format(how),
    )
    print_plan(plan, as_json=as_json)
