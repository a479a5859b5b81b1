"""From a resolved model to an engine that answers, and to a service: weights, tokenizer, cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from herder.checkpoint.huggingface import load_decoder
from herder.checkpoint.quantizing import load_quantized
from herder.checkpoint.source import ModelSource
from herder.config.quantization import WeightQuantization
from herder.config.run import EngineConfig, ServeConfig
from herder.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from herder.engine.engine import Engine
from herder.engine.request import SamplingFields, SamplingParams
from herder.engine.runner import Runner
from herder.errors import ConfigError, ResourceError
from herder.serve.grammar import Grammars
from herder.serve.kernels import load_kernels
from herder.serve.metrics import ServingMetrics
from herder.serve.service import Service
from herder.units import format_gb

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def default_device() -> str:
    """The first GPU, or the CPU where there is none."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def precision_of(asked: str) -> str:
    """A key of DTYPES; for "auto" bf16, but fp32 on a GPU that would emulate it.

    CPUs without bf16 arithmetic take products in fp32 and read half as many bytes a token.
    """
    if asked != "auto":
        return asked
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp32"
    return "bf16"


def window_tokens(source: ModelSource, max_model_len: int | None) -> int:
    """Longest prompt plus answer. Raises ConfigError past the positions the model has."""
    longest = source.architecture.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the window of {source.name}, {longest} tokens. "
            f"Use --max-model-len {longest} or less, or leave it out."
        )
    return longest if max_model_len is None else max_model_len


def load_runner(
    source: ModelSource,
    tokenizer: Tokenizer,
    *,
    precision: str,
    quantization: WeightQuantization | None = None,
    window_tokens: int,
    config: EngineConfig,
) -> Runner:
    """Weights in `precision`, of layers in `quantization` where it is given, on the default device,
    and a cache of the size that `config` asks for.

    Raises ConfigError where that holds no whole window, ResourceError where it finds no memory.
    """
    check_vocabulary(tokenizer, vocab_size=source.architecture.vocab_size, model=source.name)
    if default_device() == "cpu":
        load_kernels()
    made = {"dtype": DTYPES[precision_of(precision)], "device": default_device()}
    if quantization is None:
        decoder = load_decoder(source, **made)
    else:
        decoder = load_quantized(source, quantization, **made)
    try:
        return Runner(
            decoder,
            window_tokens=window_tokens,
            eos_token_ids={*source.eos_token_ids, *tokenizer.eos_token_ids},
            num_named_tokens=tokenizer.vocab_size,
            config=config,
        )
    except RuntimeError as error:  # torch's out-of-memory errors, on the host and on a device
        raise ResourceError(
            f"no memory for a key-value cache of {window_tokens} tokens or more. Choose a smaller "
            f"one with --kv-cache-gb or --max-model-len. ({str(error).splitlines()[0]})"
        ) from error


def load_service(source: ModelSource, tokenizer_folder: Path, config: ServeConfig) -> Service:
    """Everything the endpoints need; the engine's thread runs when this returns."""
    tokenizer = load_tokenizer(tokenizer_folder)
    window = window_tokens(source, config.max_model_len)
    runner = load_runner(
        source,
        tokenizer,
        precision=config.precision,
        quantization=config.weight_quantization,
        window_tokens=window,
        config=config,
    )
    engine = Engine(runner, max_queued_requests=config.max_queued_requests)
    return Service(
        name=source.name,
        tokenizer=tokenizer,
        engine=engine,
        defaults=sampling_defaults(source),
        metrics=ServingMetrics(engine, source.name),
        grammars=Grammars(
            tokenizer,
            end_ids=runner.eos_token_ids,
            vocab_size=source.architecture.vocab_size,
        ),
        cache_bytes=runner.pages.num_bytes,
    )


def sampling_defaults(source: ModelSource) -> dict[str, Any]:
    """What generation_config.json recommends, unless it says not to sample."""
    if source.generation.get("do_sample") is False:
        return {}
    known = SamplingFields.model_fields.keys() & source.generation.keys()
    fields = {name: source.generation[name] for name in sorted(known)}
    SamplingParams(**fields)
    return fields


def banner(service: Service, config: ServeConfig, url: str) -> str:
    """What is said once requests are welcome."""
    limits = service.engine.limits
    recommended = ", ".join(f"{name} {value}" for name, value in service.defaults.items())
    how = config.weight_quantization
    weights = "" if how is None else f", weights {how}"
    lines = [
        f"{service.name} is served at {url}",
        f"  precision {precision_of(config.precision)}{weights} on {default_device()}, "
        f"window {limits.window_tokens:,} tokens, "
        f"key-value cache {format_gb(service.cache_bytes)}",
        f"  sampling unless a request says otherwise: {recommended or 'temperature 1'}",
        f"  up to {config.max_num_seqs} requests at once, each from its turn on; "
        f"up to {service.engine.max_queued_requests} more may wait",
        "",
        f"  curl {url}/v1/{_example(service)}",
    ]
    return "\n".join(lines)


def _example(service: Service) -> str:
    if service.tokenizer.has_chat_template:
        message = '{"role": "user", "content": "What is the capital of France?"}'
        path, field = "chat/completions", f'"messages": [{message}]'
    else:
        path, field = "completions", '"prompt": "The capital of France is"'
    return f"{path} -H 'content-type: application/json' -d '{{{field}, \"max_tokens\": 32}}'"
