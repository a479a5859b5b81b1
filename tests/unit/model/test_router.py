"""Every kind of router there is: what is chosen, and how much it counts."""

import pytest
import torch

from herder.config.architecture import MoeConfig
from herder.model.router import Router
from herder.model.routing import RouterNoise, Routing

NUM_TOKENS, HIDDEN = 50, 12


def make_router(**fields: object) -> Router:
    defaults = {
        "num_experts": 8,
        "num_experts_per_token": 2,
        "expert_intermediate_size": 4,
        "scoring": "softmax",
        "normalize_weights": False,
    }
    router = Router(HIDDEN, MoeConfig(**(defaults | fields)), device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return router


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def logits_of(router: Router, x: torch.Tensor) -> torch.Tensor:
    bias = 0 if router.bias is None else router.bias
    return x @ router.weight.t() + bias


def test_softmax_weights_are_probabilities_over_all_experts_unless_normalized(x):
    router = make_router(router_bias=True)
    chosen, weight = router(x, None)
    top = logits_of(router, x).softmax(-1).topk(2)
    assert torch.equal(chosen, top.indices)
    torch.testing.assert_close(weight, top.values)
    assert (weight.sum(-1) < 1).all()


def test_normalized_softmax_is_the_softmax_of_the_chosen_logits(x):
    router = make_router(router_bias=True, normalize_weights=True, choose_by_logits=True)
    chosen, weight = router(x, None)
    top = logits_of(router, x).topk(2)
    assert torch.equal(chosen, top.indices)
    torch.testing.assert_close(weight, top.values.softmax(-1))


def test_sigmoid_weights_are_each_their_own_and_a_scaling_factor_comes_last(x):
    top = logits_of(make_router(), x).topk(2).values.sigmoid()
    _, plain = make_router(scoring="sigmoid", choose_by_logits=True)(x, None)
    torch.testing.assert_close(plain, top)
    _, scaled = make_router(scoring="sigmoid", normalize_weights=True, routed_scaling_factor=2.5)(
        x, None
    )
    torch.testing.assert_close(scaled, 2.5 * top / top.sum(-1, keepdim=True))


def test_the_correction_bias_has_a_say_in_the_choice_and_none_in_the_weights(x):
    router = make_router(scoring="sigmoid", correction_bias=True)
    router.correction_bias[5] = 10
    chosen, weight = router(x, None)
    assert (chosen[:, 0] == 5).all()
    torch.testing.assert_close(weight, logits_of(router, x).sigmoid().gather(1, chosen))


def test_the_correction_bias_is_a_stored_fp32_buffer_that_no_optimizer_sees():
    router = make_router(correction_bias=True)
    assert "correction_bias" in router.state_dict()
    assert "correction_bias" not in dict(router.named_parameters())
    assert router.correction_bias.dtype == torch.float32
    assert "correction_bias" not in make_router().state_dict()


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
def test_tokens_choose_within_their_best_groups(x, group_score):
    router = make_router(
        num_groups=4, num_groups_per_token=1, group_score=group_score, scoring="sigmoid"
    )
    chosen, _ = router(x, None)
    score_TGE = logits_of(router, x).sigmoid().unflatten(1, (4, 2))
    best = score_TGE.amax(-1) if group_score == "max" else score_TGE.sum(-1)
    assert (chosen // 2 == best.argmax(-1, keepdim=True)).all()
    assert not torch.equal(chosen, logits_of(router, x).topk(2).indices)


@pytest.mark.parametrize("context", ["autocast", "bf16"])
def test_logits_are_fp32_whatever_the_activations_are(x, context):
    router = make_router()
    low_x = x.bfloat16()
    expected = logits_of(router, low_x.float()).softmax(-1).topk(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=context == "autocast"):
        chosen, weight = router(low_x, None)
    assert weight.dtype == torch.float32
    assert torch.equal(chosen, expected.indices)
    torch.testing.assert_close(weight, expected.values)


def test_padding_chooses_nobody_and_changes_nothing_for_the_rest(x):
    router = make_router(normalize_weights=True)
    real_T = torch.arange(NUM_TOKENS) % 3 != 0
    padded, alone = Routing(real_T), Routing(None)
    x[~real_T] = 1e4
    routed = padded.layer(0), alone.layer(0)
    chosen, weight = router(x, routed[0])
    assert (chosen[~real_T] == 8).all()
    assert (weight[~real_T] == 0).all()
    expected = router(x[real_T], routed[1])
    assert torch.equal(chosen[real_T], expected[0])
    torch.testing.assert_close(weight[real_T], expected[1])
    for name in ("counts_E", "probability_sum_E", "z_sum", "entropy_sum", "num_tokens"):
        torch.testing.assert_close(*(getattr(each, name) for each in routed))


def test_noise_is_added_to_the_logits_before_all_else(x):
    router = make_router(normalize_weights=True)
    token_T = torch.arange(100, 100 + NUM_TOKENS)
    routing = Routing(None, token_T, RouterNoise(1, 2, 1.0))
    chosen, weight = router(x, routing.layer(3))
    top = (logits_of(router, x) + routing.layer(3).noise_TE(8)).topk(2)
    assert torch.equal(chosen, top.indices)
    torch.testing.assert_close(weight, top.values.softmax(-1))
    assert not torch.equal(chosen, router(x, None)[0])


@pytest.mark.parametrize("loss", ["weights", "probability_sum_E", "z_sum"])
def test_gradients_reach_the_router(x, loss):
    router = make_router()
    routed = Routing(None).layer(0)
    _, weight = router(x, routed)
    value = weight if loss == "weights" else getattr(routed, loss)
    value.square().sum().backward()
    assert router.weight.grad.abs().sum() > 0
