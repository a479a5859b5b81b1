"""A tiny random decoder whose logits differ enough for greedy answers to mean something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
import torch

from herder.config.architecture import (
    ArchitectureConfig,
    GroupedQueryAttention,
    LayerSpec,
    MlpConfig,
    NormConfig,
    RopeConfig,
)
from herder.engine.engine import Engine
from herder.engine.request import Event, Finished, Request, SamplingParams
from herder.engine.runner import Runner
from herder.model.build import build_decoder, initialize_weights
from herder.model.decoder import Decoder
from tests.engine_runs import Answer, check_idle, run

VOCAB_SIZE = 64
WINDOW_TOKENS = 96


def tiny_architecture(**changes: object) -> ArchitectureConfig:
    """Two layers of 4 query and 2 key-value heads."""
    fields: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "max_position_embeddings": WINDOW_TOKENS,
        "norm": NormConfig(eps=1e-5),
        "tie_embeddings": False,
        "attention": GroupedQueryAttention(
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, scale=8**-0.5
        ),
        "ropes": (RopeConfig(theta=10_000.0, rotary_dim=8),),
        "mlp": MlpConfig(intermediate_size=48),
        "layers": (LayerSpec(), LayerSpec(attention="sliding", window=8)),
        "initializer_range": 0.3,
    }
    return ArchitectureConfig(**{**fields, **changes})


@pytest.fixture
def decoder() -> Decoder:
    """A decoder of its own for each test, always with the same weights."""
    decoder = build_decoder(tiny_architecture(), device="cpu", dtype=torch.float32)
    initialize_weights(decoder, seed=3)
    return decoder


@pytest.fixture
def runner(decoder: Decoder) -> Runner:
    """No token ends an answer."""
    return Runner(decoder, window_tokens=WINDOW_TOKENS, eos_token_ids=())


@pytest.fixture
def engine(runner: Runner) -> Iterator[Engine]:
    """An engine that is idle again after the test, or the test fails."""
    with Engine(runner, max_queued_requests=8) as engine:
        yield engine
        assert engine.wait_idle(timeout_seconds=10)
        check_idle(engine.scheduler)


class NumberText:
    """A text decoder that writes token 7 as "7 "; what follows token 63 is held to the end."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, token_id: int) -> str:
        """Two or three characters a token."""
        self._held += f"{token_id} "
        if token_id == VOCAB_SIZE - 1:
            return ""
        text, self._held = self._held, ""
        return text

    def finish(self) -> str:
        """The text of a last token 63."""
        return self._held


class Heard:
    """A listener, and the events it is told."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Event] = SimpleQueue()

    def __call__(self, event: Event) -> None:
        self.queue.put(event)

    def events(self) -> Iterator[Event]:
        """The events as they come, to the last."""
        while not isinstance(event := self.queue.get(timeout=10), Finished):
            yield event
        yield event

    def last(self) -> Finished:
        """The closing event."""
        *_, event = self.events()
        assert isinstance(event, Finished), event
        return event


@pytest.fixture
def ask(engine: Engine) -> Callable[[Request], Heard]:
    """Asks the engine, and hears the answer."""

    def ask(request: Request) -> Heard:
        heard = Heard()
        engine.submit([(request, heard)])
        return heard

    return ask


@pytest.fixture
def make_answer() -> type[Answer]:
    """A view of any list of events."""
    return Answer


@pytest.fixture
def answer(runner: Runner) -> Callable[..., Answer]:
    """The answer to one prompt, made in the test's own thread."""

    def answer(prompt_ids: list[int], *, text: bool = False, **fields: object) -> Answer:
        decoder = NumberText() if text else None
        (made,) = run(runner, Request(prompt_ids, SamplingParams(**fields), decoder))
        return made

    return answer
