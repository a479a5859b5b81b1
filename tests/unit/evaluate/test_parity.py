"""Parity with numbers this decoder made itself: what is changed on purpose must be found."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from herder.errors import ModelError
from herder.evaluate.golden import Golden, Row
from herder.evaluate.parity import ParityReport, _forward, compare, report_json, report_text
from herder.families.registry import families
from herder.model.attend import PackedAttend
from herder.model.build import build_decoder, initialize_weights, materialize
from herder.model.decoder import Decoder
from tests.reference_attend import ReferenceAttend


def build(family: str) -> Decoder:
    config = {**families()[family].tiny_config(), "num_hidden_layers": 4}
    decoder = build_decoder(families()[family].from_hf(config, family))
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=3)
    return decoder.requires_grad_(False)


@pytest.fixture
def decoder() -> Decoder:
    return build("qwen3")


def keep_hidden(x_TD: Tensor, head: nn.Linear) -> Tensor:
    """A readout that leaves the head out."""
    del head
    return x_TD


def hidden_states(decoder: Decoder, tokens_T: Tensor) -> Tensor:
    """The embedding, layers but the last, and the normed end, by calls of truncated models."""
    positions_T = torch.arange(len(tokens_T))
    attend = ReferenceAttend([len(tokens_T)])
    assert decoder.embed is not None
    states = [decoder.embed(tokens_T)]
    layers, norm = dict(decoder.layers.items()), decoder.norm
    for count in range(1, len(layers)):
        for index in list(decoder.layers.keys())[count:]:
            del decoder.layers[index]
        decoder.norm = None
        states.append(decoder(tokens_T, positions_T=positions_T, attend=attend))
        decoder.norm = norm
        for index, layer in layers.items():
            decoder.layers[index] = layer
    end_TD = decoder(tokens_T, positions_T=positions_T, attend=attend, readout=keep_hidden)
    states.append(end_TD)
    return torch.stack(states)


def make_golden(decoder: Decoder) -> Golden:
    """Rows of 9 and 6 tokens, their logits, and greedy tokens found without any cache."""
    rows = []
    for row, length in enumerate((9, 6)):
        tokens_T = torch.arange(length) * (row + 3) % 160

        def logits(tokens_T: Tensor) -> Tensor:
            count = len(tokens_T)
            attend = PackedAttend([count])
            return decoder(tokens_T, positions_T=torch.arange(count), attend=attend)

        longer = tokens_T
        for _ in range(4):
            longer = torch.cat([longer, logits(longer)[-1].argmax()[None]])
        rows.append(Row(tokens_T, torch.arange(length), logits(tokens_T), longer[length:]))
    return Golden("here", tuple(rows), hidden_states(decoder, rows[0].tokens_T))


@pytest.fixture
def golden(decoder: Decoder) -> Golden:
    return make_golden(decoder)


def test_a_model_matches_what_it_made_itself(decoder: Decoder, golden: Golden) -> None:
    report = compare(decoder, golden)
    assert report.passed
    assert report.max_abs_difference < 1e-5
    assert report.greedy_equal
    assert report.greedy_agreement == 1.0
    assert len(report.by_position) == 9
    assert len(report.by_layer) == 5
    assert report.first_differing_layer is None


def test_the_first_layer_that_differs_is_named(decoder: Decoder, golden: Golden) -> None:
    decoder.get_parameter("layers.1.feed_forward.down.weight").add_(0.05)
    report = compare(decoder, golden)
    assert not report.passed
    assert report.first_differing_layer == "layers.1"
    assert "first to differ: layers.1" in report_text(report, model="tiny")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "feed_forward.experts.down"),
        ("qwen2_moe", "feed_forward.shared.up"),
        ("deepseek_v3", "attention.key_value_up"),
        ("gpt_oss", "attention.sinks"),
        ("llama4_text", "feed_forward.router"),
        ("gemma2", "feed_forward_output_norm"),
    ],
)
def test_the_first_layer_that_differs_is_named_whatever_is_in_it(family: str, name: str) -> None:
    decoder = build(family)
    golden = make_golden(decoder)
    assert compare(decoder, golden).passed
    index = 1 if family != "qwen2_moe" else 2
    decoder.get_parameter(f"layers.{index}.{name}.weight").add_(0.5)
    assert compare(decoder, golden).first_differing_layer == f"layers.{index}"


def test_the_routers_losses_are_compared_where_they_are_known() -> None:
    decoder = build("mixtral")
    golden = make_golden(decoder)
    assert compare(decoder, golden).aux_loss_difference is None
    with torch.inference_mode():
        losses = [_forward(decoder, rows)[2] for rows in (golden.rows, golden.rows[:1])]
    known = replace(golden, aux_loss=losses[0], aux_loss_row0=losses[1])
    assert losses[0] != losses[1]
    report = compare(decoder, known)
    assert (report.aux_loss_difference, report.passed) == (0.0, True)
    assert "load balancing of the routers" in report_text(report, model="tiny")
    for field in ("aux_loss", "aux_loss_row0"):
        off = compare(decoder, replace(known, **{field: getattr(known, field) + 0.001}))
        assert off.aux_loss_difference == pytest.approx(0.001)
        assert not off.passed


def test_padded_rows_are_left_out_where_transformers_counts_padding_and_only_there() -> None:
    for family, left_out in (("llama4_text", 1), ("ministral3", 0)):
        decoder = build(family)
        golden = make_golden(decoder)
        row = golden.rows[1]
        wrong = replace(row, logits_TV=row.logits_TV + 1.0, num_pads=3)
        report = compare(decoder, replace(golden, rows=(golden.rows[0], wrong)))
        assert (report.num_rows_left_out, report.passed) == (left_out, bool(left_out))
        told = "1 padded rows left out" in report_text(report, model="tiny")
        assert told == bool(left_out)


def test_a_difference_in_one_logit_is_found_with_its_place(
    decoder: Decoder, golden: Golden
) -> None:
    row = golden.rows[1]
    logits_TV = row.logits_TV.clone()
    logits_TV[4, 77] += 0.25
    changed = replace(golden, rows=(golden.rows[0], replace(row, logits_TV=logits_TV)))
    report = compare(decoder, changed)
    assert not report.passed
    assert report.max_abs_difference == pytest.approx(0.25, abs=1e-4)
    assert (report.worst_row, report.worst_position) == (1, 4)
    assert report.by_position[4] == report.max_abs_difference
    assert max(report.by_position[:4]) < 1e-5
    assert "worst: row 1, position 4" in report_text(report, model="tiny")


def test_one_other_greedy_token_fails_though_all_logits_agree(
    decoder: Decoder, golden: Golden
) -> None:
    row = golden.rows[1]
    greedy_G = row.greedy_G.clone()
    greedy_G[3] = (greedy_G[3] + 1) % 160
    report = compare(
        decoder, replace(golden, rows=(golden.rows[0], replace(row, greedy_G=greedy_G)))
    )
    assert (report.passed, report.greedy_equal, report.greedy_agreement) == (False, False, 7 / 8)
    assert report.max_abs_difference < 1e-5


def test_rows_of_another_model_are_refused(decoder: Decoder, golden: Golden) -> None:
    row = golden.rows[0]
    other = replace(golden, rows=(replace(row, logits_TV=row.logits_TV[:, :100]),))
    with pytest.raises(ModelError, match="They are of different models"):
        compare(decoder, other)
    assert golden.hidden_LTD is not None
    with pytest.raises(ModelError, match="do not belong to this model"):
        compare(decoder, replace(golden, hidden_LTD=golden.hidden_LTD[:3]))


def test_the_report_is_one_json_object(decoder: Decoder, golden: Golden) -> None:
    told = json.loads(json.dumps(report_json(compare(decoder, golden), model="tiny")))
    assert told["model"] == "tiny"
    assert told["passed"] is True
    assert told["greedy_equal"] is True
    assert told["max_abs_difference"] < 1e-4
    assert list(told["by_layer"]) == ["embed", "layers.0", "layers.1", "layers.2", "norm"]


def test_a_report_of_damaged_weights_is_json_too(decoder: Decoder, golden: Golden) -> None:
    report = replace(compare(decoder, golden), max_abs_difference=math.nan, by_position=(math.inf,))
    told = json.dumps(report_json(report, model="tiny"), allow_nan=False)
    assert '"max_abs_difference": null' in told
    assert '"by_position": [null]' in told


def test_a_cache_or_packing_that_changes_logits_fails_too(decoder: Decoder, golden: Golden) -> None:
    report: ParityReport = compare(decoder, golden)
    assert not replace(report, cached_max_abs_difference=1e-3).passed
    assert not replace(report, packed_max_abs_difference=1e-3).passed
    text = report_text(replace(report, cached_max_abs_difference=1e-3), model="tiny")
    assert "look at what the cache or the packing changes" in text
