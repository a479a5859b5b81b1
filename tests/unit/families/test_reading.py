from __future__ import annotations

from typing import Any

import pytest

from herder.config.catalog import model_config_json
from herder.errors import ConfigError
from herder.families.registry import architecture_from_hf


def llama(**changes: Any) -> dict[str, Any]:
    return {**model_config_json("llama-3.1-405b"), **changes}


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        architecture_from_hf(llama(**changes), name="my model")
    return str(caught.value)


def test_an_unknown_key_is_refused_with_a_close_match() -> None:
    message = refused(num_key_value_head=8)
    assert "my model" in message
    assert "num_key_value_head=8" in message
    assert "Did you mean 'num_key_value_heads'?" in message


def test_all_problems_are_told_together() -> None:
    message = refused(hidden_size="big", vocab_size=0, rms_norm_eps=None, soft_cap=30, mlp_bias=1)
    for part in (
        'hidden_size is "big"',
        "vocab_size is 0; it must be a whole number of at least 1",
        "rms_norm_eps is null; it must be a number above 0",
        "soft_cap=30",
        "mlp_bias is 1; it must be true or false",
    ):
        assert part in message


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
def test_a_missing_size_is_an_error_and_never_a_default(key: str) -> None:
    config = llama()
    del config[key]
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        architecture_from_hf(config, name="x")


@pytest.mark.parametrize("value", [1.5, True, "32", [32], None])
def test_a_number_of_the_wrong_type_is_refused(value: Any) -> None:
    assert "num_hidden_layers is" in refused(num_hidden_layers=value)


def test_keys_that_no_computation_reads_are_ignored() -> None:
    plain = architecture_from_hf(llama(), name="x")
    extra = {
        "torch_dtype": "bfloat16",
        "dtype": "float16",
        "use_cache": False,
        "transformers_version": "4.2",
        "eos_token_id": [1, 2],
        "pad_token_id": None,
        "_name_or_path": "somewhere",
        "auto_map": {"AutoModel": "modeling.Mine"},
        "temperature": 0.6,
    }
    assert architecture_from_hf(llama(**extra), name="x") == plain


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_dropout", 0.1), ("is_encoder_decoder", True), ("add_cross_attention", True)],
)
def test_keys_that_would_change_the_computation_are_accepted_only_where_they_do_not(
    key: str, value: Any
) -> None:
    assert key in refused(**{key: value})
    assert architecture_from_hf(llama(**{key: type(value)(0)}), name="x")


def test_how_weights_are_stored_does_not_change_what_is_computed() -> None:
    config = llama(quantization_config={"quant_method": "awq", "bits": 4})
    assert architecture_from_hf(config, name="x") == architecture_from_hf(llama(), name="x")


def test_an_unknown_activation_gets_the_known_ones() -> None:
    assert "one of gelu, gelu_new" in refused(hidden_act="relu")
