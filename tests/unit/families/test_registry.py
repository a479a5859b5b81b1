from __future__ import annotations

import subprocess
import sys

import pytest

from herder.config.architecture import LayerSpec, NormConfig
from herder.config.catalog import model_config_json, model_names
from herder.errors import ConfigError, ModelError
from herder.families.registry import (
    architecture_from_hf,
    architecture_to_hf,
    families,
    family_named,
    family_of,
)

READ = [name for name in model_names() if model_config_json(name)["model_type"] in families()]
OTHERS = [name for name in model_names() if name not in READ]


def test_every_published_model_without_vision_is_among_those_tested() -> None:
    assert all("vision_config" in model_config_json(name) for name in OTHERS)


@pytest.mark.parametrize("name", READ)
def test_a_published_config_is_read_and_written_back_as_the_same_architecture(name: str) -> None:
    published = model_config_json(name)
    architecture = architecture_from_hf(published, name=name)
    family = family_of(published).name
    written = architecture_to_hf(architecture, family=family)
    assert architecture_from_hf(written, name=name) == architecture


@pytest.mark.parametrize("family", families())
def test_a_familys_tiny_config_is_read_and_written_back(family: str) -> None:
    architecture = architecture_from_hf(families()[family].tiny_config(), name=family)
    written = architecture_to_hf(architecture, family=family)
    assert architecture_from_hf(written, name=family) == architecture


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_family_is_refused_by_name(name: str) -> None:
    published = model_config_json(name)
    with pytest.raises(
        ModelError, match=f"{published['model_type']}.*not supported. It has a vision"
    ) as caught:
        architecture_from_hf(published, name=name)
    assert caught.value.exit_status == 2


def test_a_classifier_is_refused_though_its_family_is_known() -> None:
    config = {
        **families()["llama"].tiny_config(),
        "architectures": ["LlamaForSequenceClassification"],
    }
    with pytest.raises(ModelError, match="LlamaForSequenceClassification"):
        family_of(config)


def test_a_config_without_a_class_is_told_by_its_model_type() -> None:
    config = families()["qwen3"].tiny_config()
    del config["architectures"]
    assert family_of(config).name == "qwen3"


def test_a_config_that_names_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="neither model_type nor architectures"):
        family_of({"hidden_size": 8})


def test_an_unknown_family_name_gets_a_close_match() -> None:
    with pytest.raises(ModelError, match="Did you mean 'llama'"):
        family_named("lama")


def test_what_a_family_cannot_express_is_refused_and_named() -> None:
    architecture = architecture_from_hf(families()["llama"].tiny_config(), name="x")
    windowed = architecture.model_copy(
        update={"layers": (LayerSpec(attention="sliding", window=8),) * 2}
    )
    with pytest.raises(ModelError, match="would not keep layers"):
        architecture_to_hf(windowed, family="llama")
    offset = architecture.model_copy(update={"norm": NormConfig(eps=1e-5, weight_offset=1)})
    with pytest.raises(ModelError, match="would not keep norm"):
        architecture_to_hf(offset, family="llama")


def test_an_impossible_architecture_is_a_config_error_with_the_numbers() -> None:
    config = {**families()["llama"].tiny_config(), "num_key_value_heads": 4}
    with pytest.raises(ConfigError, match="num_key_value_heads=4 does not divide"):
        architecture_from_hf(config, name="x")


def test_families_are_found_without_importing_torch_or_numpy() -> None:
    code = (
        "import sys; from herder.families.registry import families; assert len(families()) >= 4; "
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_architectures_that_are_no_list_are_refused_by_what_was_given() -> None:
    with pytest.raises(ModelError, match=r"architectures=3 .* must be a list"):
        family_of({"model_type": "llama", "architectures": 3})
