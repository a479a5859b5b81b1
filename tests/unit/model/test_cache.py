"""Cached decoding equals the full forward, however the tokens are cut."""

import pytest
import torch

from herder.config.architecture import DynamicScaling, RopeConfig
from herder.errors import RequestError
from herder.model.cache import KvCache
from tests.reference_attend import ReferenceAttend


def cached_logits(decoder, tokens_T, cuts, num_tokens=64):
    cache = KvCache(decoder.config, num_tokens=num_tokens, dtype=torch.float32)
    parts = []
    for count in cuts:
        tokens = tokens_T[cache.length : cache.length + count]
        attend = cache.attend(count)
        parts.append(decoder(tokens, positions_T=cache.positions_T(count), attend=attend))
        cache.advance(count)
    return torch.cat(parts)


@pytest.mark.parametrize("cuts", [[29], [28, 1], [5, 1, 1, 6, 1, 1, 14], [1] * 29], ids=str)
@torch.no_grad()
def test_prefill_chunks_and_decode_steps_equal_one_forward(make_decoder, pack, cuts):
    decoder = make_decoder()
    tokens_T, positions_T = pack([29])
    whole = decoder(tokens_T, positions_T=positions_T, attend=ReferenceAttend([29]))
    torch.testing.assert_close(cached_logits(decoder, tokens_T, cuts), whole, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_cached_keys_keep_the_angles_they_were_written_with(make_decoder, pack):
    scaling = DynamicScaling(factor=2.0, original_max_position_embeddings=16)
    dynamic = make_decoder(ropes=(RopeConfig(theta=1e4, rotary_dim=6, scaling=scaling),))
    tokens_T, positions_T = pack([29])
    whole = dynamic(tokens_T, positions_T=positions_T, attend=ReferenceAttend([29]))
    cached = cached_logits(dynamic, tokens_T, [16, *[1] * 13])
    plain = cached_logits(make_decoder(), tokens_T, [16])
    torch.testing.assert_close(cached[:16], plain, atol=1e-5, rtol=1e-5)
    assert (cached[-1] - whole[-1]).abs().max() > 1e-3


def test_more_tokens_than_the_cache_holds_are_refused_with_both_numbers(make_config):
    cache = KvCache(make_config(), num_tokens=8, dtype=torch.float32)
    with pytest.raises(RequestError, match="9 tokens do not fit a key-value cache of 8"):
        cache.attend(9)


def test_the_bytes_are_two_tensors_of_layers_heads_tokens_and_head_dim(make_config):
    cache = KvCache(make_config(), num_tokens=8, dtype=torch.bfloat16)
    assert cache.pages.num_bytes == 2 * 3 * 2 * 8 * 6 * 2
