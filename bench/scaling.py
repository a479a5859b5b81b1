"""Two ranks of one thread beside one process of two, on model D; and the same of plain torch loops.

Every setting reads 2,048 tokens a step, so that what is left of two ranks' speed is what layouts
cost. Run as a script it is one setting, whose first rank answers as worker.py does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import cases
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from worker import answer, peak_bytes
from workers import Worker, take_turns

STEP_SEQUENCES = 4
SETTINGS = {
    ("herder", "one process"): 1,
    ("herder", "replicas"): 2,
    ("herder", "sharded"): 2,
    ("herder", "tensor"): 2,
    ("herder", "pipeline"): 2,
    ("torch", "one process"): 1,
    ("torch", "DDP"): 2,
    ("torch", "FSDP2"): 2,
}
"""Ranks of each. torch: transformers' Llama in a plain loop."""
LAYOUTS = {
    "one process": {},
    "replicas": {"zero_stage": 0},
    "sharded": {"zero_stage": 3},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}
SEQUENCES_AT_ONCE = {"pipeline": 1, "replicas": 2, "sharded": 2}
"""Of a micro-batch, where it is not the whole step: a pipeline wants several."""


def compare(console: Console, precision: str, arguments: argparse.Namespace) -> list[dict]:
    """All settings in turn; a row each."""
    from herder.model.linear import multiplies_bf16

    if precision == "bf16" and not multiplies_bf16():
        console.print("scaling bf16: left out, this processor would emulate the products")
        return []
    settings = [
        (side, mode, [sys.executable, __file__, side, mode, "--precision", precision])
        for side, mode in SETTINGS
        if side == "herder" or "transformers" in arguments.sides
    ]
    title = f"scaling {precision}"
    limits = {"repeats": arguments.repeats, "limit_seconds": arguments.limit}
    workers = take_turns(console, title, settings, **limits)
    return _report(console, precision, workers)


def _report(console: Console, precision: str, workers: list[Worker]) -> list[dict]:
    bases = {worker.side: worker for worker in workers if worker.mode == "one process"}
    table = Table(title=f"scaling {precision}: 2 ranks x 1 thread, 1 process x 2 threads")
    for heading in ("setting", "runs", "tokens/s", "of one process", "of herder's", "peak GB"):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    rows = []
    for worker in workers:
        rows.append(
            {
                "work": "scaling",
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


def herder_case(mode: str, precision: str) -> Callable[[], None]:
    """A step of `herder train` on this rank."""
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

    num_ranks = SETTINGS["herder", mode]
    architecture = architecture_from_hf(cases.DENSE, name="model D")
    sequences = cases.MICRO_BATCH_SIZE = SEQUENCES_AT_ONCE.get(mode, STEP_SEQUENCES)
    train = TrainConfig(
        sequence_length=cases.SEQUENCE_LENGTH,
        micro_batch_size=sequences,
        global_batch_tokens=STEP_SEQUENCES * cases.SEQUENCE_LENGTH,
        precision=precision,
    )
    cluster = ClusterConfig(nodes=1, gpus_per_node=num_ranks, gpu=gpu("cpu"))
    plan = plan_training(architecture, cluster, train, LayoutConfig(**LAYOUTS[mode]))
    device, decoder = torch.device("cpu"), build_decoder(architecture)
    mesh = None
    if num_ranks > 1:
        mesh = build_mesh(plan.mesh_axes, "cpu")
    parallel = apply(decoder, plan, mesh, device=device)
    initialize_weights(decoder, seed=0, place=copy_part)
    settings = StepSettings(
        device=device, precision=precision, loss_chunk_tokens=512, clip_norm=1.0, parallel=parallel
    )
    optimizer = build_optimizer(decoder.named_parameters(), OptimizerConfig())
    index, count = parallel.data_shard
    batches = cases.micro_batches()[: STEP_SEQUENCES // sequences][index::count]
    return lambda: train_step(decoder, optimizer, batches, settings)


def torch_case(mode: str, precision: str) -> Callable[[], None]:
    """The plain loop over transformers' model: forward, backward, clip, fused AdamW."""
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    keys = {key: value for key, value in cases.DENSE.items() if key != "model_type"}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **keys)
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
        # gloo has no mean
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    num_ranks = SETTINGS["torch", mode]
    cases.MICRO_BATCH_SIZE = STEP_SEQUENCES // num_ranks
    rows = cases.token_batches()[dist.get_rank() if num_ranks > 1 else 0]

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["herder", "torch"])
    parser.add_argument("mode")
    parser.add_argument("--precision", choices=["fp32", "bf16"], required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    num_ranks = SETTINGS[arguments.side, arguments.mode]
    torch.set_num_threads(2 if num_ranks == 1 else 1)
    build = {"herder": herder_case, "torch": torch_case}[arguments.side]
    if num_ranks == 1:
        _serve(build(arguments.mode, arguments.precision), is_alone=True)
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
        step = build(arguments.mode, arguments.precision)
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
        return {"tokens": STEP_SEQUENCES * cases.SEQUENCE_LENGTH, "seconds": seconds}

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
