from __future__ import annotations

import pytest

from herder.errors import WeightsError
from herder.families.weights import WeightRule, WeightRules

RULES = (
    WeightRule("model.embed_tokens.weight", "embed.weight"),
    WeightRule("model.layers.{layer}.up.weight", "layers.{layer}.feed_forward.up.weight"),
    WeightRule("model.layers.{layer}.gate.weight", "layers.{layer}.router.weight", layers=(1,)),
    WeightRule("lm_head.weight", "head.weight"),
)
UNTIED = WeightRules(RULES, num_layers=2, tied=False, ignorable=("model.layers.{layer}.inv_freq",))
TIED = WeightRules(RULES, num_layers=2, tied=True)

LAYERS = {
    "model.layers.0.up.weight": "layers.0.feed_forward.up.weight",
    "model.layers.1.up.weight": "layers.1.feed_forward.up.weight",
    "model.layers.1.gate.weight": "layers.1.router.weight",
}
EMBED = {"model.embed_tokens.weight": "embed.weight"}
HEAD = {"lm_head.weight": "head.weight"}


def test_every_layer_slot_is_filled_and_rules_may_be_of_some_layers() -> None:
    assert UNTIED.pairs() == {**EMBED, **LAYERS, **HEAD}


def test_names_go_both_ways() -> None:
    there = UNTIED.to_ours(UNTIED.pairs(), where="x")
    back = UNTIED.to_hub(there.values(), where="x")
    assert {hub: ours for ours, hub in back.items()} == there == UNTIED.pairs()


def test_missing_and_unknown_names_are_told_together() -> None:
    names = [name for name in UNTIED.pairs() if name != "model.layers.1.up.weight"]
    with pytest.raises(WeightsError) as caught:
        UNTIED.to_ours([*names, "model.layers.2.up.weight", "score.weight"], where="shard")
    message = str(caught.value)
    assert "shard" in message
    assert "1 missing: model.layers.1.up.weight" in message
    assert "2 that the architecture does not have: model.layers.2.up.weight, score" in message


def test_a_long_list_of_names_is_cut_and_counted() -> None:
    with pytest.raises(WeightsError, match=r"and 38 more"):
        UNTIED.to_ours([*UNTIED.pairs(), *(f"x{index}" for index in range(50))], where="x")


def test_tensors_listed_as_ignorable_are_passed_over_and_others_are_not() -> None:
    names = [*UNTIED.pairs(), "model.layers.0.inv_freq", "model.layers.11.inv_freq"]
    assert UNTIED.to_ours(names, where="x") == UNTIED.pairs()
    with pytest.raises(WeightsError, match=r"model\.layers\.x\.inv_freq"):
        UNTIED.to_ours([*names, "model.layers.x.inv_freq"], where="x")


@pytest.mark.parametrize("held", [EMBED, {**EMBED, **HEAD}])
def test_a_tied_model_loads_the_embedding(held: dict[str, str]) -> None:
    assert TIED.to_ours([*held, *LAYERS], where="x") == {**EMBED, **LAYERS}


def test_a_tied_model_with_only_a_head_fills_the_embedding_from_it() -> None:
    wanted = {"lm_head.weight": "embed.weight", **LAYERS}
    assert TIED.to_ours([*HEAD, *LAYERS], where="x") == wanted


def test_a_tied_model_with_neither_misses_its_embedding() -> None:
    with pytest.raises(WeightsError, match=r"1 missing: model\.embed_tokens\.weight"):
        TIED.to_ours(LAYERS, where="x")


def test_a_tied_head_is_not_written() -> None:
    assert HEAD.keys().isdisjoint(
        TIED.to_hub({*TIED.pairs().values()} - {"head.weight"}, where="x").values()
    )


def test_an_untied_model_without_a_head_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight"):
        UNTIED.to_ours([*EMBED, *LAYERS], where="x")


def test_our_parameters_that_no_rule_names_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"layers\.0\.extra"):
        UNTIED.to_hub([*UNTIED.pairs().values(), "layers.0.extra"], where="x")
