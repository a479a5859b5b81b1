"""Latent attention: names and shapes, what a cache keeps of it, absorbed = expanded, one graph."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from herder.config.architecture import (
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    RopeConfig,
)
from herder.model.attend import PackedAttend
from herder.model.attention import TokenPlaces
from herder.model.cache import KvCache
from tests.reference_attend import ReferenceAttend

ROPE = RopeConfig(theta=1e4, rotary_dim=6, interleaved=True)


def latent(**changes) -> LatentAttention:
    fields = {
        "num_attention_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 8,
        "scale": 0.25,
    }
    return LatentAttention(**(fields | changes))


@pytest.fixture
def make_latent(make_decoder):
    """A tiny decoder with latent attention and a sliding layer, fields changed by keyword."""
    layers = (LayerSpec(), LayerSpec(attention="sliding", window=5))

    def make(**changes):
        return make_decoder(attention=latent(**changes), ropes=(ROPE,), layers=layers)

    return make


def shapes(decoder) -> dict[str, tuple[int, ...]]:
    attention = decoder.layers["0"].attention
    return {name: tuple(weight.shape) for name, weight in attention.named_parameters()}


def test_weights_have_their_names_and_shapes_with_and_without_a_query_latent(make_latent):
    common = {
        "key_value_down.weight": (30, 32),
        "key_value_latent_norm.weight": (24,),
        "key_value_up.weight": (4 * 18, 24),
        "output.weight": (32, 4 * 8),
    }
    with_latent = {
        "query_down.weight": (20, 32),
        "query_latent_norm.weight": (20,),
        "query_up.weight": (64, 20),
    }
    biases = {"query_down.bias": (20,), "key_value_down.bias": (30,), "output.bias": (32,)}
    assert shapes(make_latent()) == common | with_latent
    assert shapes(make_latent(bias=True)) == common | with_latent | biases
    assert shapes(make_latent(q_lora_rank=None)) == common | {"query.weight": (64, 32)}


def test_a_cache_keeps_one_latent_and_one_rotated_key_a_token(make_latent):
    config = make_latent().config
    cache = KvCache(config, num_tokens=8, dtype=torch.bfloat16)
    assert cache.pages.num_bytes == 2 * 8 * 30 * 2
    (_, keys, values), _ = cache.pages.layers.values()
    assert keys.shape[2:] == (1, 24 + 6)
    assert values.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()


@pytest.mark.parametrize("rank", [None, 20])
@pytest.mark.parametrize("cuts", [[29], [5, 1, 1, 6, 1, 1, 14], [1] * 29], ids=str)
@torch.no_grad()
def test_absorbed_decoding_equals_the_expanded_forward(make_latent, pack, cuts, rank):
    decoder = make_latent(q_lora_rank=rank)
    tokens_T, positions_T = pack([29])
    whole = decoder(tokens_T, positions_T=positions_T, attend=ReferenceAttend([29]))
    cache = KvCache(decoder.config, num_tokens=32, dtype=torch.float32)
    parts = []
    for piece in tokens_T.split(cuts):
        count = len(piece)
        places = cache.positions_T(count)
        parts.append(decoder(piece, positions_T=places, attend=cache.attend(count)))
        cache.advance(count)
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_latent_norms_have_an_eps_of_their_own(make_latent, pack):
    tokens_T, positions_T = pack([9])
    given = {"positions_T": positions_T, "attend": ReferenceAttend([9])}
    plain, softened = make_latent()(tokens_T, **given), make_latent(latent_norm_eps=1.0)
    assert (softened(tokens_T, **given) - plain).abs().max() > 1e-2
    norms = [softened.layers["0"].attention.key_value_latent_norm, softened.norm]
    assert [norm.eps for norm in norms] == [1.0, 1e-5]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "attention",
    [
        latent(),
        GroupedQueryAttention(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            scale=0.4,
            sinks=True,
            logit_softcap=2.0,
        ),
    ],
    ids=lambda attention: attention.kind,
)
def test_new_documents_compile_nothing_again(make_decoder, attention):
    """Forward and backward are one graph each, also with sinks, caps and latents."""
    decoder = make_decoder(attention=attention, ropes=(ROPE,), layers=(LayerSpec(),))
    module = decoder.layers["0"].attention
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    x_TD = torch.randn(20, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for lengths in ([20], [5, 15], [1, 2, 3, 4, 10]):
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        rotary = decoder.ropes[0].tables(positions_T, longest=max(lengths), context_T=None)
        places = TokenPlaces(rotary, None)
        results = []
        for run, attend in ((module, ReferenceAttend(lengths)), (compiled, PackedAttend(lengths))):
            out_TD = run(x_TD, places, attend)
            grads = torch.autograd.grad(out_TD.square().sum(), [x_TD, *module.parameters()])
            results.append([out_TD, *grads])
        for wanted, got in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    assert counter.frame_count == 1


@torch.no_grad()
def test_a_bfloat16_model_decodes_near_its_fp32_twin(make_latent, pack):
    exact, low = make_latent(), make_latent().to(torch.bfloat16)
    tokens_T, positions_T = pack([9])
    whole = exact(tokens_T, positions_T=positions_T, attend=ReferenceAttend([9]))
    cache = KvCache(low.config, num_tokens=9, dtype=torch.bfloat16)
    parts = []
    for token in tokens_T.split(1):
        parts.append(low(token, positions_T=cache.positions_T(1), attend=cache.attend(1)))
        cache.advance(1)
    assert parts[0].dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(parts).float(), whole, atol=0.15, rtol=0.1)
