from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

import pytest
import torch

from herder.errors import WeightsError
from herder.families.weights import WeightRule, WeightRules, hub_shape

RULES = (
    WeightRule("model.embed_tokens.weight", "embed.weight"),
    WeightRule("model.layers.{layer}.up.weight", "layers.{layer}.feed_forward.up.weight"),
    WeightRule("model.layers.{layer}.gate.weight", "layers.{layer}.router.weight", layers=(1,)),
    WeightRule("lm_head.weight", "head.weight"),
)
UNTIED = WeightRules(
    RULES,
    num_layers=2,
    tied=False,
    ignorable=("model.layers.{layer}.inv_freq", "model.layers.9.{rest}"),
)
TIED = WeightRules(RULES, num_layers=2, tied=True)

LAYERS = {
    "model.layers.0.up.weight": "layers.0.feed_forward.up.weight",
    "model.layers.1.up.weight": "layers.1.feed_forward.up.weight",
    "model.layers.1.gate.weight": "layers.1.router.weight",
}
EMBED = {"model.embed_tokens.weight": "embed.weight"}
HEAD = {"lm_head.weight": "head.weight"}


Held = dict[str, str]


def names(parts: Mapping[str, Sequence[WeightRule]]) -> Held:
    """Hub name -> our name, where each hub tensor holds one of ours."""
    return {hub: each.ours for hub, (each,) in parts.items()}


ALL = {**EMBED, **LAYERS, **HEAD}


def test_every_layer_slot_is_filled_and_rules_may_be_of_some_layers() -> None:
    assert names(UNTIED.by_hub_name()) == ALL


def test_names_go_both_ways() -> None:
    assert names(UNTIED.to_ours(ALL, where="x")) == ALL
    assert names(UNTIED.to_hub(ALL.values(), where="x")) == ALL


def test_missing_and_unknown_names_are_told_together() -> None:
    held = [name for name in ALL if name != "model.layers.1.up.weight"]
    with pytest.raises(WeightsError) as caught:
        UNTIED.to_ours([*held, "model.layers.2.up.weight", "score.weight"], where="shard")
    message = str(caught.value)
    assert "shard" in message
    assert "1 missing: model.layers.1.up.weight" in message
    assert "2 that the architecture does not have: model.layers.2.up.weight, score" in message


def test_a_long_list_of_names_is_cut_and_counted() -> None:
    with pytest.raises(WeightsError, match=r"and 38 more"):
        UNTIED.to_ours([*ALL, *(f"x{index}" for index in range(50))], where="x")


def test_tensors_listed_as_ignorable_are_passed_over_and_others_are_not() -> None:
    held = [*ALL, "model.layers.0.inv_freq", "model.layers.11.inv_freq", "model.layers.9.head.a.b"]
    assert names(UNTIED.to_ours(held, where="x")) == ALL
    for other in ("model.layers.x.inv_freq", "model.layers.3.head.a.b"):
        with pytest.raises(WeightsError, match=re.escape(other)):
            UNTIED.to_ours([*held, other], where="x")


@pytest.mark.parametrize("held", [EMBED, {**EMBED, **HEAD}])
def test_a_tied_model_loads_the_embedding(held: Held) -> None:
    assert names(TIED.to_ours([*held, *LAYERS], where="x")) == {**EMBED, **LAYERS}


def test_a_tied_model_with_only_a_head_fills_the_embedding_from_it() -> None:
    wanted = {"lm_head.weight": "embed.weight", **LAYERS}
    assert names(TIED.to_ours([*HEAD, *LAYERS], where="x")) == wanted


def test_a_tied_model_with_neither_misses_its_embedding() -> None:
    with pytest.raises(WeightsError, match=r"1 missing: model\.embed_tokens\.weight"):
        TIED.to_ours(LAYERS, where="x")


def test_a_tied_head_is_not_written() -> None:
    assert names(TIED.to_hub(ALL.values(), where="x")) == {**EMBED, **LAYERS}


def test_an_untied_model_without_a_head_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight"):
        UNTIED.to_ours([*EMBED, *LAYERS], where="x")


def test_our_parameters_that_no_rule_names_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"layers\.0\.extra"):
        UNTIED.to_hub([*ALL.values(), "layers.0.extra"], where="x")


EXPERTS = WeightRules(
    (
        WeightRule("layers.{layer}.experts.{expert}.w1", "layers.{layer}.gate.weight", layers=(1,)),
        WeightRule("qkv", "query.weight", outputs=slice(0, 4)),
        WeightRule("qkv", "key.weight", outputs=slice(4, 6)),
        WeightRule("gate_up", "gate.weight", outputs=slice(0, None, 2), transposed=True),
        WeightRule("gate_up", "up.weight", outputs=slice(1, None, 2), transposed=True),
        WeightRule("gate_up_bias", "gate.bias", outputs=slice(0, None, 2)),
        WeightRule("gate_up_bias", "up.bias", outputs=slice(1, None, 2)),
        WeightRule("down", "down.weight", transposed=True),
    ),
    num_layers=2,
    num_experts=3,
    tied=False,
)
SHAPES = {
    "layers.1.gate.weight": (3, 7, 5),
    "query.weight": (4, 5),
    "key.weight": (2, 5),
    "gate.weight": (3, 7, 5),
    "up.weight": (3, 7, 5),
    "gate.bias": (3, 7),
    "up.bias": (3, 7),
    "down.weight": (3, 5, 7),
}


def test_an_expert_slot_is_filled_for_each_row_of_our_tensor() -> None:
    found = [part for (part,) in list(EXPERTS.by_hub_name().values())[:3]]
    assert [(part.hub, part.ours, part.expert) for part in found] == [
        (f"layers.1.experts.{expert}.w1", "layers.1.gate.weight", expert) for expert in range(3)
    ]


@pytest.mark.parametrize(
    ("hub", "shape"),
    [
        ("layers.1.experts.2.w1", (7, 5)),
        ("qkv", (6, 5)),
        ("gate_up", (3, 5, 14)),
        ("gate_up_bias", (3, 14)),
        ("down", (3, 7, 5)),
    ],
)
def test_a_hub_tensor_is_as_large_as_the_parts_it_holds(hub: str, shape: tuple[int, ...]) -> None:
    assert hub_shape(EXPERTS.by_hub_name()[hub], SHAPES) == shape


def test_a_part_is_the_view_of_a_hub_tensor_that_has_our_shape() -> None:
    for parts in EXPERTS.by_hub_name().values():
        whole = torch.arange(prod(hub_shape(parts, SHAPES))).reshape(hub_shape(parts, SHAPES))
        views = [part.part_of(whole) for part in parts]
        wanted = [SHAPES[part.ours][0 if part.expert is None else 1 :] for part in parts]
        assert [tuple(view.shape) for view in views] == wanted
        values = torch.cat([view.flatten() for view in views])
        assert values.sort().values.tolist() == list(range(whole.numel())), "parts overlap"


def test_interleaved_outputs_take_turns_after_the_transposition() -> None:
    gate, up = EXPERTS.by_hub_name()["gate_up"]
    whole = torch.arange(3 * 5 * 14).reshape(3, 5, 14)
    assert torch.equal(gate.part_of(whole)[1, 2], whole[1, :, 4])
    assert torch.equal(up.part_of(whole)[1, 2], whole[1, :, 5])
