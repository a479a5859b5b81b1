"""The work that is timed, once for each side: the same model, tokens, threads and optimizer.

Building a case includes warm-up and compilation. Calling it does one repetition and returns how
many tokens that processed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

DENSE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1_408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2_048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
"""Model D: 56.4 M parameters."""
ROUTED = {
    **DENSE,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.0,
}
"""Model M: 29.8 M parameters."""
MANY_EXPERTS = ("experts", "experts-forward")
EXPERT_COUNTS = ("8", "16", "32", "64")
SEQUENCE_LENGTH = 512
MICRO_BATCH_SIZE = 4
TRAINED = {"train": DENSE, "train-moe": ROUTED}
"""The works that are optimizer steps, and their models."""
PREFILL_TOKENS = 1_024
DECODE_PROMPT_TOKENS = 32
DECODE_TOKENS = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Case = Callable[[], int]


def build(side: str, work: str, precision: str, mode: str, model: Path | None, device: str) -> Case:
    """The case of one row and column of the tables."""
    if work in MANY_EXPERTS:
        config = {**ROUTED, "num_local_experts": int(mode)}
        return herder_passes(config, precision, device, backward=work == "experts")
    if work in TRAINED:
        training = {"herder": herder_training, "transformers": transformers_training}[side]
        return training(TRAINED[work], precision, device, compiled=mode == "compile")
    builders = {
        ("herder", "decode"): herder_decoding,
        ("transformers", "decode"): transformers_decoding,
        ("herder", "prefill"): herder_prefill,
        ("transformers", "prefill"): transformers_prefill,
    }
    return builders[side, work](precision, model, device)


def token_batches(vocab_size: int = DENSE["vocab_size"]) -> torch.Tensor:
    """[8, MICRO_BATCH_SIZE, SEQUENCE_LENGTH], the same random ids for both sides."""
    generator = torch.Generator().manual_seed(0)
    shape = (8, MICRO_BATCH_SIZE, SEQUENCE_LENGTH)
    return torch.randint(0, vocab_size, shape, generator=generator)


def prompt_tokens(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1_000, 40_000, (num_tokens,), generator=generator)


def herder_training(config: dict, precision: str, device: str, *, compiled: bool) -> Case:
    """One optimizer step of `herder train` a call."""
    from herder.config.run import OptimizerConfig
    from herder.parallel.compile import apply_compile
    from herder.train.optimizer import build_optimizer
    from herder.train.step import train_step

    decoder, settings = _herder_model(config, precision, device)
    if compiled:
        apply_compile(decoder.layers, device_type=device)
    optimizer = build_optimizer(decoder.named_parameters(), OptimizerConfig())
    batches = micro_batches()
    return _cycle(batches, lambda batch: train_step(decoder, optimizer, [batch], settings))


def herder_passes(config: dict, precision: str, device: str, *, backward: bool) -> Case:
    """Forward of one micro-batch a call, and backward, gradients accumulating.

    The optimizer is left out: it updates all experts, whatever the tokens chose. So does backward
    write the gradient of all experts, which is memory alone: 0.4 GB of it at 64 experts.
    """
    from herder.train.routers import routing_of
    from herder.train.step import summed_loss

    decoder, settings = _herder_model(config, precision, device)

    def passes(batch) -> None:
        batch = batch.to(device)
        routing = routing_of(decoder.config, batch)
        with torch.set_grad_enabled(backward):
            loss = summed_loss(decoder, batch, settings, routing)
        if backward:
            loss.backward()

    return _cycle(micro_batches(), passes)


def _herder_model(config: dict, precision: str, device: str):
    from herder.families.registry import architecture_from_hf
    from herder.model.build import build_decoder, initialize_weights, materialize
    from herder.train.step import StepSettings

    decoder = build_decoder(architecture_from_hf(config, name="the benchmark's model"))
    materialize(decoder, device=device)
    initialize_weights(decoder, seed=0)
    settings = StepSettings(
        device=torch.device(device), precision=precision, loss_chunk_tokens=512, clip_norm=1.0
    )
    return decoder, settings


def micro_batches(vocab_size: int = DENSE["vocab_size"]) -> list:
    from herder.data.batch import MicroBatch

    positions_T = torch.arange(SEQUENCE_LENGTH).repeat(MICRO_BATCH_SIZE)
    weights_T = (positions_T < SEQUENCE_LENGTH - 1).float()
    return [
        MicroBatch(
            tokens_T=rows.flatten(),
            positions_T=positions_T,
            targets_T=rows.roll(-1, dims=1).flatten(),
            weights_T=weights_T,
            real_T=torch.ones_like(weights_T, dtype=torch.bool),
            document_lengths=(SEQUENCE_LENGTH,) * MICRO_BATCH_SIZE,
        )
        for rows in token_batches(vocab_size)
    ]


def transformers_training(config: dict, precision: str, device: str, *, compiled: bool) -> Case:
    """The plain loop: model with labels, backward, clip to 1.0, fused AdamW."""
    import transformers

    keys = {key: value for key, value in config.items() if key != "model_type"}
    settings = transformers.AutoConfig.for_model(config["model_type"], **keys)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings).to(device).train()
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(rows: torch.Tensor) -> None:
        rows = rows.to(device)
        with _autocast(precision, device):
            loss = called(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return _cycle(list(token_batches()), step)


def herder_decoding(precision: str, model: Path | None, device: str) -> Case:
    """Greedy tokens after a short prompt, through the token loop that serves."""
    return _herder_answer(precision, model, device, DECODE_PROMPT_TOKENS, DECODE_TOKENS)


def herder_prefill(precision: str, model: Path | None, device: str) -> Case:
    """A long prompt and its first token, through the token loop that serves."""
    answer = _herder_answer(precision, model, device, PREFILL_TOKENS, 1)
    return lambda: answer() * PREFILL_TOKENS


def _herder_answer(
    precision: str, model: Path | None, device: str, num_prompt_tokens: int, num_tokens: int
) -> Case:
    from herder.checkpoint.huggingface import load_weights
    from herder.checkpoint.source import resolve_model
    from herder.config.run import EngineConfig
    from herder.engine.engine import Engine
    from herder.engine.request import Request, SamplingParams, TokenMade
    from herder.engine.runner import Runner
    from herder.model.build import build_decoder
    from herder.serve.kernels import load_kernels

    if device == "cpu":
        load_kernels()
    source = resolve_model(str(model))
    decoder = build_decoder(source.architecture, dtype=DTYPES[precision])
    load_weights(decoder, source, device=device)
    config = EngineConfig(max_num_seqs=1, prefix_caching=False)
    engine = Engine(
        Runner(decoder, window_tokens=2_048, eos_token_ids=source.eos_token_ids, config=config)
    )
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    request = Request(prompt_tokens(num_prompt_tokens).tolist(), params)

    def answer() -> int:
        return sum(isinstance(event, TokenMade) for event in engine.answer(request))

    return answer


def transformers_decoding(precision: str, model: Path | None, device: str) -> Case:
    """`generate`, greedy, the same prompt and number of tokens."""
    network = _transformers_model(precision, model, device)
    prompt = prompt_tokens(DECODE_PROMPT_TOKENS)[None].to(device)

    @torch.inference_mode()
    def decode() -> int:
        out = network.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=DECODE_TOKENS,
            max_new_tokens=DECODE_TOKENS,
            pad_token_id=0,
        )
        return out.shape[1] - prompt.shape[1]

    return decode


def transformers_prefill(precision: str, model: Path | None, device: str) -> Case:
    """One forward of the same long prompt with a cache, logits of the last token only."""
    network = _transformers_model(precision, model, device)
    prompt = prompt_tokens(PREFILL_TOKENS)[None].to(device)

    @torch.inference_mode()
    def prefill() -> int:
        network(input_ids=prompt, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return PREFILL_TOKENS

    return prefill


def _autocast(precision: str, device: str) -> contextlib.AbstractContextManager[object]:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16)


def _cycle(batches: list, step: Callable) -> Case:
    position = iter(range(1 << 30))

    def run() -> int:
        step(batches[next(position) % len(batches)])
        return MICRO_BATCH_SIZE * SEQUENCE_LENGTH

    return run


def _transformers_model(precision: str, model: Path | None, device: str):
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[precision])
    return network.to(device).eval()
