"""One optimizer step: every token counts the same, and a step that is not finite is not taken."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from herder.config.run import OptimizerConfig
from herder.data.batch import MicroBatch
from herder.model.decoder import Decoder
from herder.train.optimizer import build_optimizer
from herder.train.step import NonFiniteError, StepSettings, held_out_loss, train_step

Build = Callable[[], Decoder]
Documents = list[list[int]]
Pack = Callable[..., MicroBatch]


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in decoder.named_parameters()
        if parameter.grad is not None
    }


def optimizer_of(decoder: Decoder) -> torch.optim.AdamW:
    return build_optimizer(decoder.named_parameters(), OptimizerConfig(learning_rate=1e-3))


def test_accumulation_over_uneven_micro_batches_equals_one_big_batch(
    build: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    whole, parts = build(), build()
    one = train_step(whole, optimizer_of(whole), [pack(documents)], settings)
    split = [pack(documents[:1], padding=20), pack(documents[1:3]), pack(documents[3:])]
    many = train_step(parts, optimizer_of(parts), split, settings)
    assert one.weight == many.weight == sum(len(ids) - 1 for ids in documents)
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-5)
    expected = gradients(whole)
    for name, gradient in gradients(parts).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_cross_entropy_of_the_documents_one_by_one(
    build: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    decoder = build()
    result = train_step(decoder, optimizer_of(decoder), [pack(documents, padding=3)], settings)
    fresh, total = build(), 0.0
    for ids in documents:
        batch = pack([ids])
        found = held_out_loss(fresh, [batch], settings)
        assert found is not None
        total += found[0] * found[1]
    assert result.loss == pytest.approx(total / result.weight, rel=1e-5)


def test_clipping_scales_the_whole_gradient_to_the_norm(
    build: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    decoder = build()
    limit = replace(settings, clip_norm=0.01)
    result = train_step(decoder, optimizer_of(decoder), [pack(documents)], limit)
    assert result.gradient_norm > 0.01
    squares = sum(float(g.square().sum()) for g in gradients(decoder).values())
    assert math.sqrt(squares) == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_below_the_limit_is_left_alone(
    build: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    decoder = build()
    result = train_step(decoder, optimizer_of(decoder), [pack(documents)], settings)
    squares = sum(float(g.square().sum()) for g in gradients(decoder).values())
    assert math.sqrt(squares) == pytest.approx(result.gradient_norm, rel=1e-5)


@pytest.mark.parametrize("broken", ["embed.weight", "layers.1.feed_forward.down.weight"])
def test_a_step_that_is_not_finite_changes_nothing(
    build: Build, settings: StepSettings, documents: Documents, pack: Pack, broken: str
) -> None:
    decoder = build()
    optimizer = optimizer_of(decoder)
    train_step(decoder, optimizer, [pack(documents)], settings)
    with torch.no_grad():
        decoder.get_parameter(broken)[0, 0] = math.inf
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    with pytest.raises(NonFiniteError) as caught:
        train_step(decoder, optimizer, [pack(documents)], settings)
    assert not math.isfinite(caught.value.result.loss)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter.detach(), before[name])
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_bf16_keeps_fp32_parameters_and_comes_close_to_fp32(
    build: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    decoder, low = build(), build()
    full = train_step(decoder, optimizer_of(decoder), [pack(documents)], settings)
    bf16 = replace(settings, precision="bf16")
    result = train_step(low, optimizer_of(low), [pack(documents)], bf16)
    assert result.loss != full.loss
    assert result.loss == pytest.approx(full.loss, rel=1e-2)
    assert {parameter.dtype for parameter in low.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in gradients(low).values()} == {torch.float32}


def test_held_out_loss_leaves_no_gradients(
    build: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    decoder = build()
    found = held_out_loss(decoder, [pack(documents[:2]), pack(documents[2:])], settings)
    assert found is not None
    loss, tokens = found
    assert tokens == sum(len(ids) - 1 for ids in documents)
    assert 0 < loss < 10
    assert gradients(decoder) == {}


def test_a_signal_ends_an_evaluation_between_micro_batches(
    build: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    decoder, forwards = build(), list[int]()
    decoder.register_forward_hook(lambda *_: forwards.append(1))
    batches = [pack([ids]) for ids in documents]
    found = held_out_loss(decoder, batches, settings, is_stopped=lambda: len(forwards) == 2)
    assert found is None
    assert len(forwards) == 2


def test_training_lowers_the_loss(
    build: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    decoder = build()
    optimizer = optimizer_of(decoder)
    losses = [train_step(decoder, optimizer, [pack(documents)], settings).loss for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5
