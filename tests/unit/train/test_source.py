"""Which model a recipe trains: a source, a source with keys replaced, or a config of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from herder.checkpoint.source import ModelSource, resolve_model
from herder.config.run import ModelConfig
from herder.errors import ConfigError
from herder.families.registry import architecture_from_hf
from herder.train.source import find_model, model_files
from tests.tiny import LLAMA_JSON

CONFIG = {**LLAMA_JSON, "eos_token_id": 2}


def find(**fields: Any) -> ModelSource:
    return find_model(ModelConfig.model_validate(fields), resolve_model)


def test_a_config_of_ones_own_is_read_as_its_family_reads_it() -> None:
    source = find(config=CONFIG, initialize="random")
    assert source.architecture == architecture_from_hf(CONFIG, name="test")
    assert (source.family, source.weights, source.eos_token_ids) == ("llama", None, (2,))


def test_keys_of_a_published_model_can_be_replaced() -> None:
    source = find(source="smollm2-135m", override={"num_hidden_layers": 2}, initialize="random")
    assert source.architecture.num_layers == 2
    assert source.architecture.hidden_size == 576


def test_a_key_that_is_not_there_cannot_be_replaced() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'num_hidden_layers'"):
        find(source="smollm2-135m", override={"num_hiden_layers": 2}, initialize="random")


def test_fields_of_the_architecture_can_be_replaced_whatever_it_came_from() -> None:
    changes = {"norm": {"eps": 1e-6}, "initializer_range": 0.01}
    for origin in ({"config": CONFIG}, {"source": "smollm2-135m"}):
        before = find(**origin, initialize="random").architecture
        after = find(**origin, architecture=changes, initialize="random").architecture
        assert (after.norm.eps, after.initializer_range) == (1e-6, 0.01)
        assert after.layers == before.layers


def test_a_field_that_the_architecture_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model.architecture: norm.epps: unknown key. Did you"):
        find(config=CONFIG, architecture={"norm": {"epps": 1e-6}}, initialize="random")


def test_pretrained_weights_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has a config but no weights.*initialize=random"):
        find(source="llama-2-7b")
    assert find(source="llama-2-7b", initialize="random").family == "llama"


def test_the_files_beside_the_weights_make_the_folder_a_model(
    tmp_path: Path, small_tokenizer_json: str
) -> None:
    tokenizer = tmp_path / "my-tokenizer.json"
    tokenizer.write_text(small_tokenizer_json)
    source = find(config=CONFIG, initialize="random")
    files = model_files(source, tokenizer)
    assert files["tokenizer.json"].decode() == small_tokenizer_json
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    read = resolve_model(str(folder))
    assert read.architecture == source.architecture
    assert read.eos_token_ids == (2,)
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [2]


def test_a_folders_tokenizer_comes_with_its_settings_and_template(
    tmp_path: Path, small_tokenizer_json: str
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"):
        (tmp_path / name).write_text(small_tokenizer_json)
    files = model_files(find(config=CONFIG, initialize="random"), tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < set(files)
    assert "README.md" not in files
