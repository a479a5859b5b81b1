"""A request's result does not depend on neighbours, order of arrival, size of chunks and blocks,
what is cached, preemption or the C++ operators: in fp32 on CPU equal tokens, and log-probabilities
within BOUND.

The oracle is each request alone, in one chunk, without a prefix cache and without the operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch

from herder.config.architecture import (
    DynamicScaling,
    LatentAttention,
    LayerSpec,
    RopeConfig,
)
from herder.config.run import EngineConfig
from herder.engine.request import PromptScored, Request, SamplingParams, TokenMade
from herder.engine.runner import Runner
from herder.model.decoder import Decoder
from herder.model.kernels import Kernels
from herder.plan.flops import key_value_elements
from herder.serve.kernels import load_kernels
from herder.units import GB
from tests.engine_runs import Answer, run, scheduler_of
from tests.tiny import initialized, tiny_model

WINDOW_TOKENS = 64
BOUND = 3e-5
"""Of log-probabilities, which are as low as -15; the largest difference seen was 5.3e-6."""
LATENT = LatentAttention(
    num_attention_heads=4,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=8,
    scale=0.25,
)
DYNAMIC = DynamicScaling(factor=4.0, original_max_position_embeddings=24)
MODELS = {
    "dense": tiny_model("dd"),
    "sliding": tiny_model("dw", attention={"sinks": True, "logit_softcap": 5.0}),
    "chunked": tiny_model(layers=(LayerSpec(attention="chunked", window=12), LayerSpec())),
    "latent": tiny_model(
        "dd", attention=None, ropes=(RopeConfig(theta=1e4, rotary_dim=6, interleaved=True),)
    ).model_copy(update={"attention": LATENT}),
    "routed": tiny_model("mdm"),
    "dynamic": tiny_model("dd", ropes=(RopeConfig(theta=1e4, rotary_dim=8, scaling=DYNAMIC),)),
}
SHARED = [(7 * index) % 62 for index in range(32)]
"""Whole blocks of every size below."""


def asked() -> list[Request]:
    """Greedy and drawn answers, penalties, scores, a whole prompt and parts of it in common."""
    greedy, drawn = {"temperature": 0, "logprobs": 0}, {"temperature": 1.3, "logprobs": 2}
    given = [
        (SHARED, {**greedy, "max_tokens": 12}),
        (SHARED, {**drawn, "seed": 1, "max_tokens": 14}),
        (SHARED, {**drawn, "seed": 2, "max_tokens": 9, "top_p": 0.9, "frequency_penalty": 1.0}),
        ([*SHARED[:20], 9, 9], {**drawn, "seed": 3, "max_tokens": 20, "min_tokens": 3}),
        (SHARED, {**greedy, "max_tokens": 4, "prompt_logprobs": 1}),
        ([5], {**greedy, "max_tokens": 30}),
        (SHARED[::-1] + SHARED[:20], {**drawn, "seed": 4, "max_tokens": 12}),
    ]
    return [Request(ids, SamplingParams(**fields)) for ids, fields in given]


@cache
def decoder_of(model: str) -> Decoder:
    return initialized(MODELS[model])


def runner_of(model: str, **config: object) -> Runner:
    return Runner(
        decoder_of(model),
        window_tokens=WINDOW_TOKENS,
        eos_token_ids=(3,),
        config=EngineConfig(**config),
    )


@cache
def expected(model: str) -> list[Answer]:
    """The oracle's answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernels, "operators", None)
        runner = runner_of(model, prefix_caching=False)
        return [run(runner, request)[0] for request in asked()]


def logprobs(answer: Answer) -> list[float]:
    """All log-probabilities of an answer: of its prompt, its tokens and their alternatives."""
    scored = [
        each
        for event in answer.events
        for each in (
            event.logprobs
            if isinstance(event, PromptScored)
            else [getattr(event, "logprobs", None)]
        )
        if each is not None
    ]
    return [one.logprob for each in scored for one in (each.chosen, *each.top)]


def difference(answers: list[Answer], wanted: list[Answer]) -> float:
    """The largest of log-probabilities, where all tokens are equal."""
    worst = 0.0
    for own, other in zip(answers, wanted, strict=True):
        assert own.ids == other.ids
        assert (own.last.reason, own.last.stopped_by) == (other.last.reason, other.last.stopped_by)
        pairs = zip(logprobs(own), logprobs(other), strict=True)
        worst = max(worst, *(abs(one - two) for one, two in pairs))
    return worst


@dataclass(frozen=True)
class Cell:
    """One way to serve."""

    together: bool
    chunk: int
    block_size: int
    prefix: str
    small_pool: bool
    operators: bool


CELLS = [
    Cell(*each)
    for each in product(
        (True, False),
        (1, 7, 64, 512),
        (1, 4, 16),
        ("off", "cold", "warm"),
        (True, False),
        (True, False),
    )
]
FEW = [
    Cell(True, 512, 16, "warm", False, True),
    Cell(True, 7, 4, "cold", True, True),
    Cell(True, 64, 1, "warm", True, False),
    Cell(False, 7, 16, "warm", False, False),
]
"""Each value of each dimension, and what meets most rarely: hits, chunks and preemption at once."""


def check(model: str, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """The largest difference of log-probabilities, and how often a request gave way."""
    load_kernels()
    operators = Kernels.operators
    assert operators is not None, "no C++ compiler on this machine"
    wanted = expected(model)
    monkeypatch.setattr(Kernels, "operators", operators if cell.operators else None)
    config = {
        "max_num_batched_tokens": cell.chunk,
        "block_size": cell.block_size,
        "prefix_caching": cell.prefix != "off",
    }
    if cell.small_pool:  # one and a half windows in every layer
        architecture = MODELS[model]
        token_bytes = architecture.num_layers * key_value_elements(architecture) * 4
        config["kv_cache_gb"] = 1.5 * token_bytes * WINDOW_TOKENS / GB
    runner = runner_of(model, **config)
    scheduler = scheduler_of(runner)
    for _ in range(2 if cell.prefix == "warm" else 1):
        if cell.together:
            answers = run(runner, *asked()[::-1], scheduler=scheduler)[::-1]
        else:
            answers = [run(runner, request, scheduler=scheduler)[0] for request in asked()]
        worst = difference(answers, wanted)
        assert worst < BOUND
    if cell.prefix == "off":
        assert scheduler.num_tokens_found == 0
    if cell.prefix == "warm":
        assert scheduler.num_tokens_found >= len(SHARED) - cell.block_size
    return worst, scheduler.num_preemptions


@pytest.mark.parametrize("cell", FEW, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_an_answer_depends_on_nothing_but_its_request(
    model: str, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, num_preemptions = check(model, cell, monkeypatch)
    assert (num_preemptions > 0) == cell.small_pool


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_nor_in_any_other_way_to_serve(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [check(model, cell, monkeypatch) for cell in CELLS]
    worst = max(each for each, _ in found)
    assert any(num_preemptions for _, num_preemptions in found)
    print(f"{model}: log-probabilities differ by up to {worst:.1e}")


def test_answers_are_different_and_long_enough_to_mean_something() -> None:
    for model in MODELS:
        ids = [answer.ids for answer in expected(model)]
        assert len({tuple(each) for each in ids}) >= 6
        assert (
            sum(isinstance(e, TokenMade) for answer in expected(model) for e in answer.events) > 50
        )


def test_weights_that_were_trained_meanwhile_find_nothing_of_the_old_ones() -> None:
    decoder = initialized(MODELS["dense"])
    runner = Runner(decoder, window_tokens=WINDOW_TOKENS, eos_token_ids=())
    scheduler = scheduler_of(runner)
    request = asked()[0]
    (before,) = run(runner, request, scheduler=scheduler)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(1.5)
    (after,) = run(runner, request, scheduler=scheduler)
    assert scheduler.num_tokens_found == 0
    fresh = Runner(decoder, window_tokens=WINDOW_TOKENS, eos_token_ids=())
    assert difference([after], run(fresh, request)) < BOUND
    assert before.ids != after.ids
