"""Building: meta first, weights by name, ties kept, unsupported parts refused."""

import pytest
import torch

from herder.config.architecture import LayerSpec, NormConfig, RopeConfig
from herder.errors import ModelError
from herder.model.attend import PackedAttend
from herder.model.build import build_decoder, initialize_weights, materialize, num_parameters


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
