"""Routed feed-forwards compute what transformers' do, for any number and order of tokens."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from herder.config.architecture import MoeConfig
from herder.model.experts import Moe
from herder.model.routing import Routing, load_balancing_loss
from herder.parallel.recompute import apply_recompute

HIDDEN, WIDTH, SHARED, EXPERTS = 16, 24, 20, 8


class Case(NamedTuple):
    """A block of transformers, and the record of the same computation."""

    block: Callable[[], nn.Module]
    fields: dict[str, Any]
    is_transposed: bool = False
    is_interleaved: bool = False


def _qwen2() -> nn.Module:
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=SHARED,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=False,
    )
    return Qwen2MoeSparseMoeBlock(config)


def _deepseek_v2(method: str) -> nn.Module:
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        moe_intermediate_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        topk_method=method,
        routed_scaling_factor=1.5,
    )
    return DeepseekV2Moe(config)


def _deepseek_v3(*, normalizes: bool) -> nn.Module:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=normalizes,
        routed_scaling_factor=2.5,
    )
    return DeepseekV3MoE(config)


V3 = {
    "num_experts_per_token": 3,
    "scoring": "sigmoid",
    "correction_bias": True,
    "num_groups": 4,
    "num_groups_per_token": 2,
    "group_score": "top2_sum",
    "routed_scaling_factor": 2.5,
    "shared_expert_intermediate_size": WIDTH,
}
CASES = {
    "mixtral": Case(
        lambda: MixtralSparseMoeBlock(
            MixtralConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS)
        ),
        {"normalize_weights": True},
    ),
    "qwen2_moe": Case(
        _qwen2, {"shared_expert_intermediate_size": SHARED, "shared_expert_gate": True}
    ),
    "qwen3_moe": Case(
        lambda: Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(
                hidden_size=HIDDEN,
                moe_intermediate_size=WIDTH,
                num_experts=EXPERTS,
                num_experts_per_tok=3,
                norm_topk_prob=True,
            )
        ),
        {"num_experts_per_token": 3, "normalize_weights": True},
    ),
    "olmoe": Case(
        lambda: OlmoeSparseMoeBlock(
            OlmoeConfig(
                hidden_size=HIDDEN,
                intermediate_size=WIDTH,
                num_experts=EXPERTS,
                num_experts_per_tok=3,
            )
        ),
        {"num_experts_per_token": 3},
    ),
    "deepseek_v2, greedy": Case(
        lambda: _deepseek_v2("greedy"),
        {
            "num_experts_per_token": 3,
            "routed_scaling_factor": 1.5,
            "shared_expert_intermediate_size": 2 * WIDTH,
        },
    ),
    "deepseek_v2, group limits": Case(
        lambda: _deepseek_v2("group_limited_greedy"),
        {
            "num_experts_per_token": 3,
            "routed_scaling_factor": 1.5,
            "num_groups": 4,
            "num_groups_per_token": 2,
            "shared_expert_intermediate_size": 2 * WIDTH,
        },
    ),
    "deepseek_v3": Case(lambda: _deepseek_v3(normalizes=True), {**V3, "normalize_weights": True}),
    "deepseek_v3, not normalized": Case(lambda: _deepseek_v3(normalizes=False), V3),
    "llama4": Case(
        lambda: Llama4TextMoe(
            Llama4TextConfig(
                hidden_size=HIDDEN,
                intermediate_size=WIDTH,
                num_local_experts=EXPERTS,
                num_experts_per_tok=2,
            )
        ),
        {
            "scoring": "sigmoid",
            "choose_by_logits": True,
            "weight_on_input": True,
            "shared_expert_intermediate_size": WIDTH,
        },
        is_transposed=True,
    ),
    "gpt_oss": Case(
        lambda: GptOssMLP(
            GptOssConfig(
                hidden_size=HIDDEN,
                intermediate_size=WIDTH,
                num_local_experts=EXPERTS,
                num_experts_per_tok=3,
                swiglu_limit=1.0,
            )
        ),
        {
            "num_experts_per_token": 3,
            "choose_by_logits": True,
            "normalize_weights": True,
            "router_bias": True,
            "expert_bias": True,
            "activation": "clamped_swiglu",
            "swiglu_limit": 1.0,
        },
        is_transposed=True,
        is_interleaved=True,
    ),
}


def make_moe(**fields: Any) -> Moe:
    defaults = {
        "num_experts": EXPERTS,
        "num_experts_per_token": 2,
        "expert_intermediate_size": WIDTH,
        "scoring": "softmax",
        "normalize_weights": False,
    }
    moe = Moe(HIDDEN, MoeConfig(**(defaults | fields)), device="cpu", dtype=torch.float32)
    randomize(moe)
    return moe


def randomize(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            each.normal_(0, 0.3, generator=generator)


def make_x(num_tokens: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, HIDDEN, generator=generator).requires_grad_()


def ours_of(block: nn.Module, case: Case, what: Callable[[Tensor], Any]) -> Iterator[tuple]:
    """(our name, what is asked of their tensor, laid out as ours)."""

    def gate_and_up(merged: Tensor) -> tuple[Tensor, Tensor]:
        if case.is_interleaved:
            return merged[:, 0::2], merged[:, 1::2]
        return merged.chunk(2, dim=1)

    router = getattr(block, "gate", None) or block.router
    for name, tensor in (*router.named_parameters(), *router.named_buffers()):
        yield f"router.{name.removeprefix('e_score_')}", what(tensor)
    for name, tensor in block.experts.named_parameters():
        kind = "bias" if name.endswith("_bias") else "weight"
        value = what(tensor)
        if case.is_transposed and kind == "weight":
            value = value.transpose(1, 2)
        if name.startswith("down"):
            yield f"experts.down.{kind}", value
        else:
            for part, half in zip(("gate", "up"), gate_and_up(value), strict=True):
                yield f"experts.{part}.{kind}", half
    shared = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
    if shared is not None:
        for part in ("gate", "up", "down"):
            yield f"shared.{part}.weight", what(getattr(shared, f"{part}_proj").weight)
    if hasattr(block, "shared_expert_gate"):
        yield "shared_gate.weight", what(block.shared_expert_gate.weight)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_gradients_equal_those_of_transformers(case):
    block = case.block()
    randomize(block)
    moe = make_moe(**case.fields)
    missing = moe.load_state_dict(dict(ours_of(block, case, lambda tensor: tensor.detach())))
    assert not missing.missing_keys
    x = make_x()
    theirs = block(x[None])
    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).view_as(x)
    ours = moe(x)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    upstream = make_x(40).detach().flip(0)
    (their_x_grad,) = torch.autograd.grad(theirs, x, upstream, retain_graph=True)
    theirs.backward(upstream)
    x.grad = None
    ours.backward(upstream)
    torch.testing.assert_close(x.grad, their_x_grad, rtol=1e-5, atol=1e-5)
    ours_by_name = dict(moe.named_parameters())
    for name, grad in ours_of(block, case, lambda tensor: tensor.grad):
        if name in ours_by_name:
            torch.testing.assert_close(ours_by_name[name].grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"weight_on_input": True}], ids=["output", "input"])
def test_the_order_of_tokens_changes_nothing(fields):
    moe = make_moe(**fields, num_experts_per_token=3)
    x, order = make_x(), torch.randperm(40, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(moe(x[order]), moe(x)[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_few_tokens_or_none_work_forward_and_backward(num_tokens):
    moe, x = make_moe(expert_bias=True), make_x(num_tokens)
    out = moe(x)
    torch.testing.assert_close(out, moe(make_x())[:num_tokens], rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in moe.parameters())
    with torch.no_grad():
        torch.testing.assert_close(moe(x), out)


@pytest.mark.parametrize("fields", [{}, {"weight_on_input": True}], ids=["output", "input"])
def test_padding_is_routed_nowhere_and_has_no_say_in_any_gradient(fields):
    moe = make_moe(**fields, expert_bias=True)
    real_T = torch.arange(40) % 4 != 1
    grads = []
    for is_padded in (True, False):
        moe.zero_grad()
        x = make_x()
        routing = Routing(real_T if is_padded else None)
        layer = routing.layer(0)
        out = moe(x if is_padded else x[real_T], layer)
        if is_padded:
            assert (out[~real_T] == 0).all()
            out = out[real_T]
        routing.keep(layer)
        (out.square().sum() + load_balancing_loss(routing.records, EXPERTS)).backward()
        grads.append([x.grad, *(parameter.grad for parameter in moe.parameters())])
    assert (grads[0][0][~real_T] == 0).all()
    for padded, alone in zip(*grads, strict=True):
        torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_router_through_the_weights_with_all_else_frozen():
    moe = make_moe()
    moe.experts.requires_grad_(False)
    moe(make_x().detach()).square().sum().backward()
    assert moe.router.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in moe.experts.parameters())


def test_the_number_of_experts_a_token_takes_is_a_field_of_the_record_alone():
    two, four = make_moe(), make_moe(num_experts_per_token=4)
    assert [*two.state_dict()] == [*four.state_dict()]
    assert not torch.allclose(two(make_x()), four(make_x()))


def test_bf16_stays_close_to_fp32_and_comes_out_as_bf16():
    moe, x = make_moe(), make_x().detach()
    expected = moe(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(x.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


def test_of_the_wide_activations_only_gate_and_up_are_kept():
    moe = make_moe()
    kept = set()

    def remember(tensor: Tensor) -> Tensor:
        if tensor.shape == (80, WIDTH):
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        moe(make_x())
    assert len(kept) == 2


def test_a_listener_is_told_one_experts_activations_and_gradients_until_it_is_removed():
    moe, x = make_moe(), make_x()
    told = []
    handle = moe.experts.watch(3, lambda kind, rows_RD: told.append((kind, rows_RD)))
    moe(x).sum().backward()
    chosen, weight = moe.router(x, None)
    experts = moe.experts
    gate, up, down = (each.weight[3] for each in (experts.gate, experts.up, experts.down))
    takes, place = (chosen == 3).nonzero(as_tuple=True)
    rows = x[takes]
    expected = (torch.nn.functional.silu(rows @ gate.t()) * (rows @ up.t())) @ down.t()
    assert [kind for kind, _ in told] == ["activation", "gradient"]
    torch.testing.assert_close(told[0][1], expected.detach())
    torch.testing.assert_close(told[1][1], weight[takes, place, None].expand_as(rows).detach())
    handle.remove()
    moe(x).sum().backward()
    assert len(told) == 2


class Wrapped(nn.Module):
    """A routed layer with a residual, as a decoder has it."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = make_moe(scoring="sigmoid", correction_bias=True, normalize_weights=True)

    def forward(self, x_TD: Tensor, routing: Any) -> Tensor:
        return x_TD + self.moe(x_TD, routing)


def loss_and_gradients(layers: nn.ModuleDict) -> tuple[list[Tensor], dict]:
    routing, x = Routing(torch.arange(40) < 33), make_x()
    first = x
    for index, layer in layers.items():
        routed = routing.layer(int(index))
        x = layer(x, routed)
        routing.keep(routed)
    loss = x.square().sum() + load_balancing_loss(routing.records, EXPERTS)
    before = {index: record.probability_sum_E for index, record in routing.records.items()}
    layers.zero_grad()
    loss.backward()
    records = {index: record.probability_sum_E for index, record in routing.records.items()}
    assert all(records[index] is before[index] for index in before)
    grads = [first.grad, *(parameter.grad for parameter in layers.parameters())]
    return [loss, *grads, *records.values()], routing.records


def test_recompute_gives_the_same_records_and_gradients():
    layers = nn.ModuleDict({"0": Wrapped(), "1": Wrapped()})
    expected, _ = loss_and_gradients(layers)
    expected = [each.clone() for each in expected]
    apply_recompute(layers, "full")
    actual, records = loss_and_gradients(layers)
    assert list(records) == [0, 1]
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize(("recompute", "backend"), [("none", "aot_eager"), ("full", "eager")])
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
def test_compiled_routed_layers_share_one_graph_and_give_equal_values(recompute, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = nn.ModuleDict({"0": Wrapped(), "1": Wrapped()})
    expected = [each.clone() for each in loss_and_gradients(layers)[0]]
    apply_recompute(layers, recompute)
    for layer in layers.values():
        # Recompute's hooks are context managers, which no whole graph may create.
        layer.compile(backend=backend, fullgraph=recompute == "none")
    actual, _ = loss_and_gradients(layers)
    for ours, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
