"""Building: meta first, weights by name, ties kept, unsupported parts refused."""

import pytest
import torch

from herder.config.architecture import LayerSpec, MoeConfig, NormConfig, RopeConfig
from herder.errors import ModelError
from herder.model.attend import PackedAttend
from herder.model.build import build_decoder, initialize_weights, materialize, num_parameters
from herder.model.routing import Routing


def routed(num_experts: int = 4, **fields: object) -> dict[str, object]:
    """One dense layer, then two routed ones."""
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=2,
        expert_intermediate_size=24,
        scoring="sigmoid",
        normalize_weights=True,
        **fields,
    )
    layers = (LayerSpec(), *(LayerSpec(feed_forward="routed"),) * 2)
    return {"moe": moe, "layers": layers}


def test_a_decoder_is_built_without_memory(make_config):
    decoder = build_decoder(make_config())
    assert {p.device.type for p in decoder.parameters()} == {"meta"}


def test_weights_depend_on_seed_and_name_only(make_decoder, make_config):
    wide, deep = make_decoder(), make_decoder(layers=make_config().layers * 2)
    assert torch.equal(
        wide.layers["2"].feed_forward.up.weight, deep.layers["2"].feed_forward.up.weight
    )
    assert not torch.equal(
        wide.layers["0"].attention.key.weight, wide.layers["0"].attention.value.weight
    )
    other = make_decoder()
    initialize_weights(other, seed=2)
    assert not torch.equal(wide.embed.weight, other.embed.weight)


def test_norms_start_as_the_identity_also_where_an_offset_is_added(make_decoder):
    assert (make_decoder().norm.weight == 1).all()
    assert (make_decoder(norm=NormConfig(eps=1e-6, weight_offset=1)).norm.weight == 0).all()


def test_a_tie_survives_materializing_and_a_step(make_config):
    decoder = build_decoder(make_config(tie_embeddings=True))
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=0)
    assert decoder.head.weight is decoder.embed.weight
    assert num_parameters(decoder) == num_parameters(build_decoder(make_config())) - 97 * 32


def test_casting_the_model_leaves_rope_tables_alone(make_decoder, pack):
    decoder = make_decoder().to(torch.bfloat16)
    tokens_T, positions_T = pack([9])
    decoder(tokens_T, positions_T=positions_T, attend=PackedAttend([9]))
    assert decoder.ropes[0]._cos_PR.dtype == torch.float32


def test_a_computation_that_is_missing_is_refused_by_name(make_config):
    rope = RopeConfig(theta=1e4, rotary_dim=6, sections=(1, 1, 1))
    with pytest.raises(ModelError, match="cross-attention, sectioned rope"):
        build_decoder(make_config(layers=(LayerSpec(cross_attention=True),), ropes=(rope,)))


def test_a_stage_without_embedding_and_head_takes_and_returns_hidden_states(make_decoder, pack):
    tokens_T, positions_T = pack([7, 4])
    whole, first, last = make_decoder(), make_decoder(), make_decoder()
    attend = PackedAttend([7, 4])
    del first.layers["2"]
    first.norm = first.head = None
    for index in ("0", "1"):
        del last.layers[index]
    last.embed = None
    hidden_TD = first(tokens_T, positions_T=positions_T, attend=attend)
    staged = last(hidden_TD, positions_T=positions_T, attend=attend)
    assert torch.equal(staged, whole(tokens_T, positions_T=positions_T, attend=attend))


def test_a_routed_layer_has_the_names_that_families_and_checkpoints_go_by(make_config):
    fields = {
        "correction_bias": True,
        "router_bias": True,
        "expert_bias": True,
        "shared_expert_intermediate_size": 20,
        "shared_expert_gate": True,
    }
    decoder = build_decoder(make_config(**routed(**fields)))
    layer = decoder.layers["1"].feed_forward
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == {
        "router.weight": (4, 32),
        "router.bias": (4,),
        "router.correction_bias": (4,),
        "experts.gate.weight": (4, 24, 32),
        "experts.gate.bias": (4, 24),
        "experts.up.weight": (4, 24, 32),
        "experts.up.bias": (4, 24),
        "experts.down.weight": (4, 32, 24),
        "experts.down.bias": (4, 32),
        "shared.gate.weight": (20, 32),
        "shared.up.weight": (20, 32),
        "shared.down.weight": (32, 20),
        "shared_gate.weight": (1, 32),
    }
    dense = decoder.layers["0"].feed_forward
    assert [*dense.state_dict()] == ["gate.weight", "up.weight", "down.weight"]


def test_an_experts_weights_do_not_depend_on_how_many_there_are(make_decoder):
    four, six = make_decoder(**routed(4)), make_decoder(**routed(6))
    for name in ("gate", "up", "down"):
        weights = [
            d.layers["1"].feed_forward.experts.get_submodule(name).weight for d in (four, six)
        ]
        assert torch.equal(weights[0], weights[1][:4])
        assert not torch.equal(weights[0][0], weights[0][1])
        assert weights[0].std().item() == pytest.approx(0.2, rel=0.1)


def test_routers_are_fp32_in_a_bf16_model_and_their_correction_starts_at_zero(make_config):
    decoder = build_decoder(make_config(**routed(correction_bias=True)), dtype=torch.bfloat16)
    materialize(decoder, device="cpu")
    for buffer in decoder.buffers():
        buffer.fill_(torch.nan)
    initialize_weights(decoder, seed=0)
    router = decoder.layers["2"].feed_forward.router
    assert router.weight.dtype == router.correction_bias.dtype == torch.float32
    assert decoder.layers["2"].feed_forward.experts.up.weight.dtype == torch.bfloat16
    assert (router.correction_bias == 0).all()
    assert num_parameters(decoder) == num_parameters(build_decoder(make_config(**routed())))


def test_routed_layers_of_a_forward_leave_their_records_and_dense_ones_none(make_decoder, pack):
    tokens_T, positions_T = pack([7, 4])
    routing = Routing(torch.arange(11) < 9)
    attend = PackedAttend([7, 4], routing=routing)
    decoder = make_decoder(**routed())
    logits_TV = decoder(tokens_T, positions_T=positions_T, attend=attend)
    assert list(routing.records) == [1, 2]
    assert [record.counts_E.sum().item() for record in routing.records.values()] == [18, 18]
    alone_TV = decoder(tokens_T, positions_T=positions_T, attend=PackedAttend([7, 4]))
    torch.testing.assert_close(logits_TV[:9], alone_TV[:9])


def test_embeddings_are_scaled_by_a_number_rounded_as_they_are(make_decoder):
    plain, scaled = make_decoder(), make_decoder(embedding_scale=32**0.5)
    tokens_T = torch.arange(5)
    torch.testing.assert_close(scaled.embed(tokens_T), plain.embed(tokens_T) * 32**0.5)
    scale = torch.tensor(32**0.5).bfloat16()
    expected_TD = plain.bfloat16().embed(tokens_T) * scale
    assert torch.equal(scaled.bfloat16().embed(tokens_T), expected_TD)
