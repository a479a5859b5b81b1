from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from herder.checkpoint.gguf_file import read_gguf
from herder.checkpoint.gguf_metadata import config_json, eos_token_ids
from herder.checkpoint.source import resolve_model
from herder.config.architecture import Llama3Scaling, RopeConfig, RopeScaling
from herder.errors import ModelError
from herder.model.decoder import Decoder
from herder.model.rope import attention_factor, inverse_frequencies

MakeDecoder = Callable[..., Decoder]
WriteGguf = Callable[..., Path]


@pytest.fixture
def scaling_of(make_decoder: MakeDecoder, write_gguf: WriteGguf) -> Callable[..., RopeScaling]:
    def read(**entries: Any) -> RopeScaling:
        metadata = {f"llama.rope.{key.replace('__', '.')}": v for key, v in entries.items()}
        path = write_gguf(make_decoder("llama"), metadata=metadata)
        return resolve_model(str(path)).architecture.ropes[0].scaling

    return read


def test_no_rope_entries_mean_no_scaling(scaling_of: Callable[..., RopeScaling]) -> None:
    assert scaling_of().kind == "default"
    assert scaling_of(scaling__type="none").kind == "default"


def test_linear_scaling_is_read_in_its_new_and_its_old_form(
    scaling_of: Callable[..., RopeScaling],
) -> None:
    new = scaling_of(scaling__type="linear", scaling__factor=4.0)
    assert new == scaling_of(scale_linear=4.0)
    assert (new.kind, getattr(new, "factor", None)) == ("linear", 4.0)


def test_yarn_is_read(scaling_of: Callable[..., RopeScaling]) -> None:
    entries = {"scaling__factor": 4.0, "scaling__original_context_length": 32}
    plain = scaling_of(scaling__type="yarn", **entries)
    assert plain.model_dump(include={"kind", "factor", "original_max_position_embeddings"}) == {
        "kind": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    more = scaling_of(scaling__type="yarn", scaling__attn_factor=1.5, **entries)
    ratio = getattr(more, "attention_factor", 0.0) / getattr(plain, "attention_factor", 1.0)
    assert ratio == pytest.approx(1.5)


def test_an_unknown_scaling_is_refused(scaling_of: Callable[..., RopeScaling]) -> None:
    with pytest.raises(ModelError, match="rope scaling 'longrope'"):
        scaling_of(scaling__type="longrope", scaling__factor=4.0)


def write_factors(
    make_decoder: MakeDecoder, write_gguf: WriteGguf, factors: np.ndarray
) -> RopeConfig:
    decoder = make_decoder("llama", hidden_size=48, num_attention_heads=6, head_dim=64)
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    path = write_gguf(decoder, extra=extra, metadata={"llama.rope.freq_base": 500_000.0})
    return resolve_model(str(path)).architecture.ropes[0]


def test_llama_3_scaling_is_found_again_in_the_divisors_it_was_stored_as(
    make_decoder: MakeDecoder, write_gguf: WriteGguf
) -> None:
    scaling = Llama3Scaling(
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain_R = inverse_frequencies(RopeConfig(theta=500_000.0, rotary_dim=64))
    scaled_R = inverse_frequencies(RopeConfig(theta=500_000.0, rotary_dim=64, scaling=scaling))
    rope = write_factors(make_decoder, write_gguf, (plain_R / scaled_R).numpy())
    assert rope.scaling == scaling


def test_other_divisors_are_kept_as_they_are(
    make_decoder: MakeDecoder, write_gguf: WriteGguf
) -> None:
    factors = np.linspace(1.0, 7.0, 32)
    rope = write_factors(make_decoder, write_gguf, factors)
    plain_R = inverse_frequencies(RopeConfig(theta=500_000.0, rotary_dim=64))
    for use_long_factors in (False, True):
        own_R = inverse_frequencies(rope, use_long_factors=use_long_factors)
        torch.testing.assert_close(own_R, plain_R / torch.tensor(factors).float())
    assert attention_factor(rope) == 1.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.sliding_window": 4096}, "sliding window"),
        (
            {"llama.logit_scale": 0.5},
            r"not known .*\(llama.logit_scale\)",
        ),
        ({"llama.attention.value_length": 4}, "different widths"),
        ({"llama.attention.head_count_kv": [2, 2]}, "differ from layer to layer"),
        ({"llama.attention.head_count": 0}, "head_count=0"),
        ({"llama.rope.dimension_count": 4}, "rotates 4 of 8 dims"),
        ({"llama.block_count": None, "llama.context_length": None}, "block_count, llama.context"),
    ],
)
def test_what_a_gguf_file_says_and_cannot_be_read_is_refused(
    metadata: dict[str, Any], message: str, make_decoder: MakeDecoder, write_gguf: WriteGguf
) -> None:
    path = write_gguf(make_decoder("llama"), metadata=metadata)
    with pytest.raises(ModelError, match=message):
        config_json(read_gguf(path))


def test_an_unknown_architecture_is_refused_with_those_known(
    make_decoder: MakeDecoder, write_gguf: WriteGguf
) -> None:
    path = write_gguf(make_decoder("llama"), architecture="gemma2")
    with pytest.raises(ModelError, match=r"'gemma2' is not supported. Known: llama, qwen2, qwen3"):
        resolve_model(str(path))


def test_every_end_of_a_turn_is_an_end() -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7}
    assert eos_token_ids(metadata) == (5, 7)
    assert eos_token_ids({**metadata, "tokenizer.ggml.eom_token_id": 5}) == (5, 7)
    assert eos_token_ids({}) == ()
