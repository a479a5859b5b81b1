"""Routers in training: what joins the loss, what steers balance, and what is told of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from herder.config.architecture import MoeConfig, NoiseConfig
from herder.config.run import OptimizerConfig
from herder.data.batch import MicroBatch
from herder.model.attend import PackedAttend
from herder.model.decoder import Decoder
from herder.model.routing import RouterNoise, load_balancing_loss, z_loss
from herder.parallel.recompute import apply_recompute
from herder.train.optimizer import build_optimizer
from herder.train.routers import (
    RouterWatch,
    RoutingTotals,
    router_noise,
    routing_of,
    update_correction_biases,
)
from herder.train.step import NonFiniteError, StepResult, StepSettings, train_step

Build = Callable[..., Decoder]
Documents = list[list[int]]
Pack = Callable[..., MicroBatch]

ROUTER = "layers.1.feed_forward.router.weight"


def step(
    decoder: Decoder,
    batches: Sequence[MicroBatch],
    settings: StepSettings,
    noise: RouterNoise | None = None,
) -> StepResult:
    config = OptimizerConfig(learning_rate=1e-3)
    optimizer = build_optimizer(decoder.named_parameters(), config)
    return train_step(decoder, optimizer, batches, settings, noise=noise)


def totals(result: StepResult) -> RoutingTotals:
    assert result.routing is not None
    return result.routing


def gradient(decoder: Decoder, name: str) -> Tensor:
    grad = decoder.get_parameter(name).grad
    assert grad is not None
    return grad


def routing_losses(decoder: Decoder, batch: MicroBatch) -> tuple[float, float]:
    routing = routing_of(decoder.config, batch)
    attend = PackedAttend(batch.document_lengths, routing=routing)
    with torch.no_grad():
        decoder(batch.tokens_T, positions_T=batch.positions_T, attend=attend)
    assert routing is not None
    return float(load_balancing_loss(routing.records, 4)), float(z_loss(routing.records))


def test_a_dense_model_has_nothing_to_tell(
    build: Callable[[], Decoder], settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    result = step(build(), [pack(documents)], settings)
    assert (result.aux_loss, result.z_loss, result.routing) == (None, None, None)
    watch = RouterWatch()
    watch.add(result.routing)
    assert watch.tell(1) == []


def test_the_loss_told_is_cross_entropy_alone(
    build_routed: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    plain = step(build_routed(), [pack(documents)], settings)
    weighted = step(
        build_routed(aux_loss_coefficient=1.0, z_loss_coefficient=1.0), [pack(documents)], settings
    )
    assert weighted.loss == plain.loss
    assert (weighted.aux_loss, weighted.z_loss) == (plain.aux_loss, plain.z_loss)
    assert weighted.gradient_norm > plain.gradient_norm


def test_each_micro_batch_weighs_as_much_as_its_real_tokens(
    build_routed: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    decoder = build_routed()
    batches = [pack(documents[:1], padding=30), pack(documents[1:])]
    shares = [batch.num_real_tokens / sum(b.num_real_tokens for b in batches) for batch in batches]
    each = [routing_losses(decoder, batch) for batch in batches]
    result = step(decoder, batches, settings)
    for index, told in enumerate((result.aux_loss, result.z_loss)):
        mean = sum(share * losses[index] for share, losses in zip(shares, each, strict=True))
        assert told == pytest.approx(mean, rel=1e-6)


def test_coefficients_scale_the_gradients_that_reach_a_router(
    build_routed: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    gradients = []
    for aux, z in ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 0.1)):
        decoder = build_routed(aux_loss_coefficient=aux, z_loss_coefficient=z)
        step(decoder, [pack(documents)], settings)
        gradients.append(gradient(decoder, ROUTER))
    none, half, whole, both = gradients
    assert (whole - none).norm() > 0.01 * none.norm()
    torch.testing.assert_close(whole - none, 2 * (half - none), rtol=1e-4, atol=1e-6)
    assert (both - whole).norm() > 0.01 * none.norm()


def test_padding_changes_no_loss_no_count_and_no_gradient(
    build_routed: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    bare, padded = (build_routed(aux_loss_coefficient=0.1) for _ in range(2))
    one = step(bare, [pack(documents)], settings)
    other = step(padded, [pack(documents, padding=29)], settings)
    assert torch.equal(totals(other).counts_LE, totals(one).counts_LE)
    assert totals(other).num_tokens == totals(one).num_tokens == one.weight
    assert totals(one).counts_LE.sum() == 2 * one.weight
    assert other.aux_loss == pytest.approx(one.aux_loss, rel=1e-6)
    torch.testing.assert_close(gradient(padded, ROUTER), gradient(bare, ROUTER))


@pytest.mark.parametrize("settings_change", [{}, {"precision": "bf16"}])
def test_recompute_gives_the_same_losses_counts_and_gradients(
    build_routed: Build,
    settings: StepSettings,
    documents: Documents,
    pack: Pack,
    settings_change: dict[str, str],
) -> None:
    settings = replace(settings, **settings_change)
    kept, again = (build_routed(aux_loss_coefficient=0.1) for _ in range(2))
    apply_recompute(again.layers, "full")
    noise = RouterNoise(seed=1, step=2, std=0.5)
    one = step(kept, [pack(documents, padding=2)], settings, noise)
    other = step(again, [pack(documents, padding=2)], settings, noise)
    assert (other.loss, other.aux_loss, other.gradient_norm) == (
        one.loss,
        one.aux_loss,
        one.gradient_norm,
    )
    assert torch.equal(totals(other).counts_LE, totals(one).counts_LE)
    assert torch.equal(gradient(again, ROUTER), gradient(kept, ROUTER))


def test_noise_does_not_depend_on_how_a_step_is_cut(
    build_routed: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    noise = RouterNoise(seed=1, step=2, std=1.0)
    whole = step(build_routed(), [pack(documents)], settings, noise)
    first = pack(documents[:2])
    second = replace(pack(documents[2:]), first_token=first.num_tokens)
    parts = step(build_routed(), [first, second], settings, noise)
    assert torch.equal(totals(parts).counts_LE, totals(whole).counts_LE)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    quiet = step(build_routed(), [pack(documents)], settings)
    assert not torch.equal(totals(quiet).counts_LE, totals(whole).counts_LE)
    unnumbered = step(build_routed(), [first, pack(documents[2:])], settings, noise)
    assert not torch.equal(totals(unnumbered).counts_LE, totals(whole).counts_LE)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo hides it itself
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
def test_a_compiled_routed_layer_is_one_graph_whatever_the_step_and_its_noise(
    build_routed: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    plain, compiled = (build_routed(aux_loss_coefficient=0.1) for _ in range(2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.layers["1"].compile(backend="eager", fullgraph=True)
    for index in range(3):
        batch = pack(documents[index:], padding=30 - index)
        noise = RouterNoise(seed=1, step=index, std=0.5 / (index + 1))
        expected = step(plain, [batch], settings, noise)
        result = step(compiled, [batch], settings, noise)
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)
        assert result.aux_loss == pytest.approx(expected.aux_loss, rel=1e-6)
        assert torch.equal(totals(result).counts_LE, totals(expected).counts_LE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


def test_noise_decays_in_a_straight_line_to_none() -> None:
    moe = MoeConfig(
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_size=16,
        scoring="softmax",
        normalize_weights=True,
        noise=NoiseConfig(std=0.1, decay_steps=10),
    )
    made = [router_noise(moe, seed=0, step=step) for step in (0, 5, 10, 11)]
    assert [noise and noise.std for noise in made] == [0.1, pytest.approx(0.05), None, None]
    assert router_noise(moe.model_copy(update={"noise": None}), seed=0, step=0) is None
    assert router_noise(None, seed=0, step=0) is None


def bias_of(decoder: Decoder) -> Tensor:
    return decoder.get_buffer("layers.1.feed_forward.router.correction_bias").clone()


def test_a_bias_moves_by_its_rate_towards_balance(
    build_routed: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    decoder = build_routed(
        scoring="sigmoid", correction_bias=True, correction_bias_update_rate=0.001
    )
    batches = [pack(documents[:2]), pack(documents[2:])]
    counts_E = totals(step(decoder, batches, settings)).counts_LE[0]
    moved = (0.001 * torch.sign(counts_E.float().mean() - counts_E)).tolist()
    assert bias_of(decoder).tolist() == pytest.approx(moved)
    assert min(moved) < 0 < max(moved)


def test_bias_updates_alone_balance_a_router(build_routed: Build) -> None:
    decoder = build_routed(
        scoring="sigmoid", correction_bias=True, correction_bias_update_rate=0.02
    )
    x_TD = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        decoder.get_parameter(ROUTER)[0] = 0.0
        decoder.get_buffer("layers.1.feed_forward.router.correction_bias")[0] = 2.0
    counts = list[Tensor]()
    for _ in range(150):
        chosen_TK, _ = decoder.get_submodule("layers.1.feed_forward.router")(x_TD, None)
        counts.append(chosen_TK.flatten().bincount(minlength=4))
        totals = RoutingTotals((1,), 200, counts[-1][None], torch.zeros(1), torch.zeros(1))
        update_correction_biases(decoder, totals)
    assert counts[0][0] == 200
    assert counts[-1].max() < 1.2 * counts[-1].float().mean()


def test_without_a_rate_or_after_a_step_that_is_not_finite_a_bias_stays(
    build_routed: Build, settings: StepSettings, documents: Documents, pack: Pack
) -> None:
    fixed = build_routed(correction_bias=True)
    step(fixed, [pack(documents)], settings)
    assert bias_of(fixed).tolist() == [0.0] * 4
    broken = build_routed(correction_bias=True, correction_bias_update_rate=0.1)
    with torch.no_grad():
        broken.get_parameter("layers.1.feed_forward.experts.down.weight")[:] = torch.inf
    with pytest.raises(NonFiniteError):
        step(broken, [pack(documents)], settings)
    assert bias_of(broken).tolist() == [0.0] * 4


def some_totals(*counts: int, num_tokens: int = 10) -> RoutingTotals:
    return RoutingTotals(
        layers=(3,),
        num_tokens=num_tokens,
        counts_LE=torch.tensor([counts]),
        entropy_sum_L=torch.tensor([num_tokens * 0.5]),
        dropped_L=torch.tensor([0]),
    )


def test_what_is_told_covers_all_steps_since_the_last_time() -> None:
    watch = RouterWatch()
    for counts in ((10, 5, 5, 0), (10, 0, 5, 5)):
        watch.add(some_totals(*counts))
    (stats,) = watch.tell(2)
    assert (stats.step, stats.layer, stats.tokens) == (2, 3, 20)
    assert stats.selections == (20, 5, 10, 5)
    assert stats.imbalance == 2.0
    assert (stats.entropy, stats.max_entropy) == (pytest.approx(0.5), pytest.approx(1.3862944))
    assert (stats.dominant, stats.dead, stats.dropped_tokens) == ((0,), (), 0)
    assert watch.tell(3) == []


def test_an_expert_is_dead_after_several_events_without_it_and_may_come_back() -> None:
    watch, dead = RouterWatch(), []
    for step_done in range(1, 8):
        watch.add(some_totals(5, 5, 9, 1 if step_done == 7 else 0))
        dead += [stats.dead for stats in watch.tell(step_done)]
    assert dead == [(), (), (), (), (3,), (3,), ()]


def test_an_expert_that_over_nine_tenths_of_the_tokens_chose_is_dominant() -> None:
    watch = RouterWatch()
    watch.add(some_totals(19, 18, 2, 1, num_tokens=20))
    assert watch.tell(1)[0].dominant == (0,)
    watch.add(some_totals(20, 20, 20, 20, num_tokens=20))
    assert watch.tell(2)[0].dominant == ()  # every token takes every expert
