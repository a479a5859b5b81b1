"""Two ranks of one thread beside one process of two, and the same of torch and transformers.

Every setting of a comparison reads the same 2,048 tokens a step, so that what is left of two ranks'
speed is what layouts cost. Run as a script it is one setting, whose first rank answers as worker.py
does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import cases
import torch
import torch.distributed as dist
from memory import peak_bytes
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from worker import answer
from workers import Worker, take_turns

STEP_TOKENS = 2_048


@dataclass(frozen=True)
class Setting:
    """One of those that are compared. torch: transformers' model in a plain loop."""

    num_ranks: int = 2
    layout: dict = field(default_factory=dict)
    """herder's."""
    num_parts: int = 1
    """Micro-batches that herder's step is cut into, over all ranks: a pipeline wants several."""


ONE_PROCESS, TWO_RANKS = Setting(num_ranks=1), Setting()


@dataclass(frozen=True)
class Comparison:
    """Settings by side and mode, on the same model and tokens."""

    model: dict
    sequence_length: int
    settings: dict[tuple[str, str], Setting]


COMPARISONS = {
    "scaling": Comparison(
        cases.DENSE,
        512,
        {
            ("herder", "one process"): ONE_PROCESS,
            ("herder", "replicas"): Setting(layout={"zero_stage": 0}, num_parts=2),
            ("herder", "sharded"): Setting(layout={"zero_stage": 3}, num_parts=2),
            ("herder", "tensor"): Setting(layout={"tensor_parallel_size": 2}),
            ("herder", "pipeline"): Setting(layout={"pipeline_parallel_size": 2}, num_parts=4),
            ("torch", "one process"): ONE_PROCESS,
            ("torch", "DDP"): TWO_RANKS,
            ("torch", "FSDP2"): TWO_RANKS,
        },
    ),
    "scaling-experts": Comparison(
        cases.ROUTED,
        512,
        {
            ("herder", "one process"): ONE_PROCESS,
            ("herder", "replicas"): Setting(layout={"zero_stage": 0}, num_parts=2),
            ("herder", "experts"): Setting(
                layout={"zero_stage": 0, "expert_parallel_size": 2}, num_parts=2
            ),
            ("herder", "sharded, experts"): Setting(
                layout={"zero_stage": 3, "expert_parallel_size": 2}, num_parts=2
            ),
            ("torch", "one process"): ONE_PROCESS,
            ("torch", "DDP"): TWO_RANKS,
            ("torch", "FSDP2, experts"): TWO_RANKS,
        },
    ),
    # No peer on ranks: CPU attention has no sharding strategy in torch's context_parallel (2.13).
    "scaling-context": Comparison(
        cases.DENSE,
        2_048,
        {
            ("herder", "one process"): ONE_PROCESS,
            ("herder", "ulysses"): Setting(
                layout={"zero_stage": 0, "context_parallel_size": 2, "context_method": "ulysses"}
            ),
            ("herder", "ring"): Setting(
                layout={"zero_stage": 0, "context_parallel_size": 2, "context_method": "ring"}
            ),
            ("torch", "one process"): ONE_PROCESS,
        },
    ),
}


def compare(
    work: str, console: Console, precision: str, arguments: argparse.Namespace
) -> list[dict]:
    """All settings of one comparison in turn; a row each."""
    settings = [
        (side, mode, [sys.executable, __file__, work, side, mode, "--precision", precision])
        for side, mode in COMPARISONS[work].settings
        if side == "herder" or "transformers" in arguments.sides
    ]
    title = f"{work} {precision}"
    limits = {"repeats": arguments.repeats, "limit_seconds": arguments.limit}
    workers = take_turns(console, title, settings, **limits)
    return _report(console, work, precision, workers)


def _report(console: Console, work: str, precision: str, workers: list[Worker]) -> list[dict]:
    bases = {worker.side: worker for worker in workers if worker.mode == "one process"}
    table = Table(title=f"{work} {precision}: 2 ranks x 1 thread, 1 process x 2 threads")
    for heading in ("setting", "runs", "tokens/s", "of one process", "of herder's", "peak GB"):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    rows = []
    for worker in workers:
        rows.append(
            {
                "work": work,
                "precision": precision,
                "setting": worker.name,
                "repetitions": len(worker.rates),
                "tokens_per_second": worker.tokens_per_second,
                "ratio_to_one_process": worker.ratio_to(bases[worker.side]),
                "ratio_to_herder": worker.ratio_to(bases["herder"]),
                "peak_gb": worker.peak_gb,
            }
        )
        _, _, name, runs, rate, own, herder, peak = rows[-1].values()
        table.add_row(name, str(runs), f"{rate:.1f}", f"{own:.2f}", f"{herder:.2f}", f"{peak:.2f}")
    console.print(table, "peak GB: of the rank with most")
    return rows


def herder_case(comparison: Comparison, mode: str, precision: str) -> Callable[[], None]:
    """A step of `herder train` on this rank."""
    setting = comparison.settings["herder", mode]
    cases.MICRO_BATCH_SIZE //= setting.num_parts
    step = trainer(comparison.model, setting, precision)
    batches = cases.micro_batches()[: setting.num_parts]
    return lambda: step(batches)


def trainer(config: dict, setting: Setting, precision: str) -> Callable[[Sequence], None]:
    """What does a step on this rank's share of the micro-batches of all ranks."""
    from herder.config.catalog import gpu
    from herder.config.run import ClusterConfig, LayoutConfig, OptimizerConfig, TrainConfig
    from herder.families.registry import architecture_from_hf
    from herder.model.build import build_decoder, initialize_weights
    from herder.parallel.apply import apply
    from herder.parallel.mesh import build_mesh
    from herder.parallel.shards import copy_part
    from herder.plan.training import plan_training
    from herder.train.optimizer import build_optimizer
    from herder.train.step import StepSettings, train_step

    architecture = architecture_from_hf(config, name="the benchmark's model")
    micro_batch_tokens = cases.MICRO_BATCH_SIZE * cases.SEQUENCE_LENGTH
    train = TrainConfig(
        sequence_length=cases.SEQUENCE_LENGTH,
        micro_batch_size=cases.MICRO_BATCH_SIZE,
        global_batch_tokens=setting.num_parts * micro_batch_tokens,
        precision=precision,
    )
    cluster = ClusterConfig(nodes=1, gpus_per_node=setting.num_ranks, gpu=gpu("cpu"))
    plan = plan_training(architecture, cluster, train, LayoutConfig(**setting.layout))
    device, decoder = torch.device("cpu"), build_decoder(architecture)
    mesh = None
    if setting.num_ranks > 1:
        mesh = build_mesh(plan.mesh_axes, "cpu")
    parallel = apply(decoder, plan, mesh, device=device)
    initialize_weights(decoder, seed=0, place=copy_part)
    settings = StepSettings(
        device=device, precision=precision, loss_chunk_tokens=512, clip_norm=1.0, parallel=parallel
    )
    optimizer = build_optimizer(decoder.named_parameters(), OptimizerConfig())
    index, count = parallel.data_shard
    return lambda batches: train_step(decoder, optimizer, batches[index::count], settings)


def torch_case(comparison: Comparison, mode: str, precision: str) -> Callable[[], None]:
    """The plain loop over transformers' model: forward, backward, clip, fused AdamW."""
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    keys = {key: value for key, value in comparison.model.items() if key != "model_type"}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(comparison.model["model_type"], **keys)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    autocast = precision == "bf16"
    if mode == "DDP":
        model = DistributedDataParallel(model)
    elif mode == "FSDP2":
        dtype, autocast = (torch.bfloat16 if autocast else None), False
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    elif mode == "FSDP2, experts":
        model = _with_experts_apart(model, in_bf16=autocast)
        autocast = False
    # gloo has no mean
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    num_ranks = comparison.settings["torch", mode].num_ranks
    cases.MICRO_BATCH_SIZE //= num_ranks
    rows = cases.token_batches()[dist.get_rank() if num_ranks > 1 else 0]

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        _clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def _with_experts_apart(model: torch.nn.Module, *, in_bf16: bool) -> torch.nn.Module:
    """Half of the experts on each rank, tokens by all-to-all, the rest sharded: as transformers'
    from_pretrained does it, which on CPUs too would want accelerate."""
    from transformers.distributed import DistributedConfig

    asked = DistributedConfig(fsdp_size=2, ep_size=2, fsdp_mixed_precision=in_bf16)
    config, _, meshes = model.prepare_distribute_model(asked)
    return model.maybe_distribute_model(model, config, meshes)


def _clip(parameters: Sequence[torch.nn.Parameter]) -> None:
    """To a norm of 1. torch's own function wants one mesh; of several, all gradients are shards."""
    meshes = {each.device_mesh for each in parameters if isinstance(each, DTensor)}
    if len(meshes) < 2:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        return
    shards = [parameter.grad.to_local() for parameter in parameters]
    square = torch.nn.utils.get_total_norm(shards).square()
    dist.all_reduce(square)
    torch._foreach_mul_(shards, square.rsqrt().clamp(max=1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=COMPARISONS)
    parser.add_argument("side", choices=["herder", "torch"])
    parser.add_argument("mode")
    parser.add_argument("--precision", choices=["fp32", "bf16"], required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    comparison = COMPARISONS[arguments.work]
    cases.SEQUENCE_LENGTH = comparison.sequence_length
    cases.MICRO_BATCH_SIZE = STEP_TOKENS // comparison.sequence_length
    num_ranks = comparison.settings[arguments.side, arguments.mode].num_ranks
    torch.set_num_threads(2 if num_ranks == 1 else 1)
    build = {"herder": herder_case, "torch": torch_case}[arguments.side]
    if num_ranks == 1:
        _serve(build(comparison, arguments.mode, arguments.precision), is_alone=True)
        return
    is_first = arguments.rank == 0
    store = dist.TCPStore(
        "127.0.0.1", arguments.port or 0, is_master=is_first, wait_for_workers=False
    )
    other = None
    if is_first:
        command = [sys.executable, __file__, *sys.argv[1:], "--rank=1", f"--port={store.port}"]
        # What it prints would be read as an answer.
        other = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        dist.init_process_group("gloo", rank=arguments.rank, world_size=num_ranks, store=store)
        step = build(comparison, arguments.mode, arguments.precision)
        if is_first:
            _serve(step, is_alone=False)
        else:
            _follow(step)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        if other is not None:
            other.kill()
        raise
    finally:
        if other is not None:
            other.wait()


def _serve(step: Callable[[], None], *, is_alone: bool) -> None:
    """Answer as worker.py does; the other rank does a step whenever this one does."""

    def all_do(*, is_step: bool) -> None:
        if not is_alone:
            dist.broadcast(torch.tensor(int(is_step)), src=0)

    def timed() -> dict[str, float]:
        start = time.perf_counter()
        all_do(is_step=True)
        step()
        if not is_alone:
            dist.barrier()
        seconds = time.perf_counter() - start
        return {"tokens": STEP_TOKENS, "seconds": seconds}

    answer(timed())
    for _ in sys.stdin:
        answer(timed())
    all_do(is_step=False)
    peak = torch.tensor(peak_bytes("cpu"))
    if not is_alone:
        dist.reduce(peak, dst=0, op=dist.ReduceOp.MAX)
    answer({"peak_gb": int(peak) / 1e9})


def _follow(step: Callable[[], None]) -> None:
    """The second rank: a step whenever the first one says so."""
    told = torch.tensor(1)
    while True:
        dist.broadcast(told, src=0)
        if not told:
            dist.reduce(torch.tensor(peak_bytes("cpu")), dst=0, op=dist.ReduceOp.MAX)
            return
        step()
        dist.barrier()


if __name__ == "__main__":
    main()
