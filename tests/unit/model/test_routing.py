"""Auxiliary losses as transformers', noise as a function of its place, records kept once."""

import math

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from herder.model.routing import (
    ExpertCapacity,
    LayerRouting,
    RouterNoise,
    Routing,
    expert_counts,
    load_balancing_loss,
    routing_losses,
    routing_sums,
    z_loss,
)

NUM_EXPERTS = 6


def route(
    routing: Routing, layer: int, logits_TE: torch.Tensor, num_experts_per_token: int
) -> LayerRouting:
    """What a plain top-k router would record."""
    chosen_TK = logits_TE.topk(num_experts_per_token, -1).indices
    if routing.real_T is not None:
        chosen_TK = chosen_TK.where(routing.real_T[:, None], NUM_EXPERTS)
    each = routing.layer(layer)
    each.record(logits_TE, chosen_TK)
    routing.keep(each)
    return each


@pytest.fixture
def logits() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(14, NUM_EXPERTS, generator=generator).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_load_balancing_loss_and_its_gradient_equal_those_of_transformers(logits, k, is_padded):
    mask = torch.ones(2, 7)
    mask[1, :3] = 0
    mask = mask if is_padded else None
    expected = load_balancing_loss_func(tuple(logits), NUM_EXPERTS, k, mask)
    routing = Routing(None if mask is None else mask.flatten().bool())
    for layer, logits_TE in enumerate(logits):
        route(routing, 2 * layer, logits_TE, k)
    loss = load_balancing_loss(routing.records, NUM_EXPERTS)
    torch.testing.assert_close(loss, expected)
    grads = (torch.autograd.grad(each, logits) for each in (loss, expected))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_balanced_router_has_a_load_balancing_loss_of_k(k):
    routing = Routing(None)
    # Each token prefers k neighbours, in turn: every expert is chosen as often and as surely.
    first_T1 = torch.arange(4 * NUM_EXPERTS)[:, None] % NUM_EXPERTS
    chosen_TK = (first_T1 + torch.arange(k)) % NUM_EXPERTS
    route(routing, 0, torch.zeros(4 * NUM_EXPERTS, NUM_EXPERTS).scatter(1, chosen_TK, 2.0), k)
    loss = load_balancing_loss(routing.records, NUM_EXPERTS)
    assert loss.item() == pytest.approx(k)


def test_the_z_loss_is_the_mean_square_of_logsumexp_over_real_tokens(logits):
    real_T = torch.arange(14) > 4
    routing = Routing(real_T)
    for layer, logits_TE in enumerate(logits):
        route(routing, layer, logits_TE, 2)
    expected = torch.cat(logits)[real_T.repeat(3)].logsumexp(-1).square().mean()
    torch.testing.assert_close(z_loss(routing.records), expected)


def test_sums_of_parts_of_a_model_give_the_losses_of_the_whole_and_their_gradients(logits):
    def sums(layers):
        routing = Routing(torch.arange(14) > 4)
        for layer in layers:
            route(routing, layer, leaves[layer], 2)
        return routing_sums(routing.records)

    found = []
    for parts in ([(0, 1, 2)], [(0,), (1, 2)]):
        leaves = [logits_TE.detach().requires_grad_() for logits_TE in logits]
        losses = routing_losses(sum(sums(part) for part in parts))
        (losses * torch.tensor([1.0, 0.1])).sum().backward()
        found.append([losses.detach(), *(leaf.grad for leaf in leaves)])
    for whole, added in zip(*found, strict=True):
        assert whole.abs().sum() > 0
        torch.testing.assert_close(added, whole)


def test_losses_of_nothing_but_padding_are_zero(logits):
    routing = Routing(torch.zeros(14, dtype=torch.bool))
    route(routing, 0, logits[0], 2)
    assert load_balancing_loss(routing.records, NUM_EXPERTS).item() == 0
    assert z_loss(routing.records).item() == 0


def test_records_count_choices_and_tokens_and_entropy():
    routing = Routing(torch.tensor([True, True, False]))
    uniform = torch.zeros(3, NUM_EXPERTS)
    each = route(routing, 3, uniform, 2)
    assert each.counts_E.sum() == 4
    assert each.num_tokens == 2
    assert each.entropy_sum.item() == pytest.approx(2 * math.log(NUM_EXPERTS))
    sure = route(routing, 4, torch.eye(3, NUM_EXPERTS) * 50, 2)
    assert sure.entropy_sum.item() == pytest.approx(0, abs=1e-6)
    assert list(routing.records) == [3, 4]


def test_counts_of_a_choice_that_is_none_are_left_out():
    chosen_TK = torch.tensor([[0, 2], [2, 4], [4, 4]])
    assert expert_counts(chosen_TK, 4).tolist() == [1, 0, 2, 0]


def test_what_is_recorded_again_after_the_forward_changes_no_record(logits):
    routing = Routing(None)
    each = route(routing, 0, logits[0], 2)
    kept = routing.records[0].probability_sum_E
    each.record(logits[1], logits[1].topk(2, -1).indices)
    assert routing.records[0].probability_sum_E is kept


def test_a_layer_that_records_nothing_leaves_no_record():
    routing = Routing(None)
    routing.keep(routing.layer(0))
    assert routing.records == {}


def noise(seed=1, step=2, layer=3, tokens=(0, 1, 2, 3), std=0.1, num_experts=NUM_EXPERTS):
    token_T = torch.tensor(tokens)
    return Routing(None, token_T, RouterNoise(seed, step, std)).layer(layer).noise_TE(num_experts)


def test_noise_is_a_function_of_seed_step_layer_token_and_expert_alone():
    base = noise()
    assert torch.equal(base, noise())
    assert torch.equal(base[[2, 0]], noise(tokens=(2, 0)))
    assert torch.equal(base[:, :3], noise(num_experts=3))
    for other in (noise(seed=2), noise(step=3), noise(layer=4), noise(tokens=(4, 5, 6, 7))):
        assert not torch.isclose(base, other).any()
    # Neither may stand for another: seed 2 of step 1 is not seed 1 of step 2.
    assert not torch.isclose(noise(seed=2, step=1), noise(seed=1, step=2)).any()


def test_noise_is_normal_and_independent_between_tokens_and_experts():
    values = noise(tokens=range(4_000), std=0.5, num_experts=8)
    assert values.dtype == torch.float32
    assert values.mean().item() == pytest.approx(0, abs=0.01)
    assert values.std().item() == pytest.approx(0.5, rel=0.02)
    assert (values.abs() < 0.5).float().mean().item() == pytest.approx(0.6827, abs=0.01)
    correlation = torch.corrcoef(values.t()).fill_diagonal_(0)
    assert correlation.abs().max() < 0.06
    assert torch.corrcoef(torch.stack([values[:-1].flatten(), values[1:].flatten()]))[0, 1] < 0.02


def test_noise_of_std_zero_is_none():
    assert noise(std=0.0) is None
    assert Routing(None).layer(0).noise_TE(4) is None


def test_noise_without_token_numbers_is_our_bug():
    with pytest.raises(AssertionError, match="token_T"):
        Routing(None, None, RouterNoise(1, 2, 0.1)).layer(0)


def test_an_expert_takes_the_choices_of_its_first_tokens_and_no_more_than_it_has_room_for():
    chosen_TK = torch.tensor([[0, 1], [1, 0], [6, 6], [0, 2], [1, 0], [2, 1]])
    capacity = ExpertCapacity(torch.tensor(2), whole=lambda x: x, part=lambda x: x)
    dropped_TK = capacity.dropped_TK(chosen_TK, NUM_EXPERTS)
    assert dropped_TK.int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1], [0, 1]]


def test_a_part_of_the_tokens_drops_what_the_whole_would():
    """Tokens 1 and 3 are here; the others, on another rank, come between."""
    whole_TK = torch.tensor([[0], [0], [0], [1]])
    here = torch.tensor([1, 3])

    def drop(choices: int) -> list[int]:
        capacity = ExpertCapacity(
            torch.tensor(choices), whole=lambda _: whole_TK, part=lambda x: x[here]
        )
        return capacity.dropped_TK(whole_TK[here], NUM_EXPERTS).flatten().int().tolist()

    assert drop(1) == [1, 0]
    assert drop(2) == [0, 0]
