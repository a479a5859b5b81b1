from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from herder.checkpoint.huggingface import save_huggingface
from herder.checkpoint.run import CheckpointWriter, TrainTensors
from herder.checkpoint.source import resolve_model
from herder.config.run import CheckpointConfig
from herder.errors import CheckpointError, ModelError, WeightsError
from herder.families.registry import architecture_to_hf
from herder.model.decoder import Decoder
from tests.tiny import meta_at, progress_at

MakeDecoder = Callable[..., Decoder]


@pytest.fixture
def folder(make_decoder: MakeDecoder, tmp_path: Path) -> Path:
    save_huggingface(make_decoder("llama"), tmp_path / "tiny", family="llama")
    return tmp_path / "tiny"


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_a_catalog_name_has_an_architecture_and_no_weights() -> None:
    source = resolve_model("Llama-3.1-405B")
    assert (source.name, source.family, source.weights) == ("llama-3.1-405b", "llama", None)
    assert source.weights is None
    assert source.architecture.num_layers == 126
    assert source.eos_token_ids == (128001,)


def test_a_folder_has_its_files_and_goes_by_its_last_name(folder: Path) -> None:
    source = resolve_model(str(folder))
    assert (source.name, source.family, source.weights) == ("tiny", "llama", "safetensors")
    assert source.files == (folder / "model.safetensors",)
    assert source.folder == folder


def test_a_folder_with_only_a_config_has_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert resolve_model(str(folder)).weights is None


def test_shards_are_those_the_index_names(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write(
        folder,
        "model.safetensors.index.json",
        {"weight_map": {"a": "two.safetensors", "b": "one.safetensors", "c": "one.safetensors"}},
    )
    files = resolve_model(str(folder)).files
    assert files == (folder / "one.safetensors", folder / "two.safetensors")


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({}, {}, ()),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (5, 7)),
        ({"eos_token_id": [9, 5]}, {"eos_token_id": 5}, (9, 5)),
        ({"eos_token_id": None}, {"eos_token_id": [3, 4]}, (3, 4)),
    ],
)
def test_every_id_that_ends_a_text_is_found(
    folder: Path, generation: dict[str, Any], config: dict[str, Any], wanted: tuple[int, ...]
) -> None:
    write(folder, "generation_config.json", generation)
    write(folder, "config.json", {**json.loads((folder / "config.json").read_text()), **config})
    assert resolve_model(str(folder)).eos_token_ids == wanted


@pytest.mark.parametrize("token", ["</s>", {"content": "</s>", "special": True}])
def test_the_tokenizers_own_end_of_text_counts_too(folder: Path, token: Any) -> None:
    write(folder, "generation_config.json", {"eos_token_id": 5})
    write(folder, "tokenizer_config.json", {"eos_token": token})
    write(folder, "tokenizer.json", {"added_tokens": [{"id": 8, "content": "</s>"}]})
    assert resolve_model(str(folder)).eos_token_ids == (5, 8)
    decoder = {"11": {"content": "</s>"}}
    settings = {"eos_token": token, "added_tokens_decoder": decoder}
    write(folder, "tokenizer_config.json", settings)
    assert resolve_model(str(folder)).eos_token_ids == (5, 11)


def test_sampling_defaults_that_are_given_come_along(folder: Path) -> None:
    generation = {"temperature": 0.7, "top_p": None, "transformers_version": "5"}
    write(folder, "generation_config.json", generation)
    assert resolve_model(str(folder)).generation == {"temperature": 0.7}


def test_a_tied_model_whose_file_holds_two_different_matrices_is_read_as_untied(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    decoder = make_decoder("llama", tie_word_embeddings=True)
    save_huggingface(decoder, tmp_path / "tied", family="llama")
    path = tmp_path / "tied" / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, path)
    same = resolve_model(str(path.parent))
    assert (same.architecture.tie_embeddings, same.notes) == (True, ())
    save_file({**tensors, "lm_head.weight": embedding + 1}, path)
    other = resolve_model(str(path.parent))
    assert not other.architecture.tie_embeddings
    assert "lm_head.weight" in other.notes[0]


def save_run(decoder: Decoder, run: Path, step: int) -> None:
    config = json.dumps(architecture_to_hf(decoder.config, family="llama"))
    optimizer = {"step": torch.ones(1)}
    tensors = TrainTensors(model=dict(decoder.named_parameters()), optimizer=optimizer)
    save = CheckpointWriter(tensors).save(
        run,
        tensors,
        progress=progress_at(step),
        meta=meta_at(step, decoder.config.model_dump(mode="json")),
        model_files={
            "config.json": config.encode(),
            "generation_config.json": b'{"eos_token_id": [4]}',
        },
        policy=CheckpointConfig(keep_last=2),
    )
    save.result()


def test_a_run_directory_is_its_newest_checkpoint(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    decoder = make_decoder("llama")
    save_run(decoder, tmp_path / "run", 3)
    save_run(decoder, tmp_path / "run", 12)
    newest = tmp_path / "run" / "checkpoints" / "step-00000012"
    for reference in (tmp_path / "run", newest):
        source = resolve_model(str(reference))
        assert (source.weights, source.folder) == ("run", newest)
        assert source.architecture == decoder.config
        assert source.eos_token_ids == (4,)


def test_a_run_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        resolve_model(str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("llama-3.1-450b", "Did you mean 'llama-3.1-405b'"),
        ("  ", "name is empty"),
        ("/nowhere/at/all", "no catalog name, folder, .gguf file or hub id"),
        ("nowhere.gguf", "nowhere.gguf cannot be read: No such file"),
        ("somebody/something", "hub model 'somebody/something'"),
    ],
)
def test_what_stands_for_no_model_is_refused(reference: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(reference)


def test_a_folder_that_is_no_model_names_the_models_in_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json, so it is no model\.$"):
        resolve_model(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelError, match=r"Name one of its files instead: a\.gguf"):
        resolve_model(str(tmp_path))


def test_a_file_of_another_kind_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="a model is a folder"):
        resolve_model(str(folder / "config.json"))


def test_pickled_weights_are_refused_with_the_way_out(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights only"):
        resolve_model(str(folder))


@pytest.mark.parametrize(("name", "error"), [("config.json", ModelError)])
def test_a_damaged_json_file_is_named(folder: Path, name: str, error: type[ModelError]) -> None:
    (folder / name).write_text('{"a": ')
    with pytest.raises(error, match=rf"{name} cannot be read"):
        resolve_model(str(folder))
    (folder / name).write_text("[]")
    with pytest.raises(error, match="must hold a JSON object"):
        resolve_model(str(folder))


def test_an_index_without_a_map_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write(folder, "model.safetensors.index.json", {})
    with pytest.raises(WeightsError, match="has no weight_map"):
        resolve_model(str(folder))
    write(folder, "model.safetensors.index.json", {"weight_map": {"lm_head.weight": 3}})
    with pytest.raises(WeightsError, match=r"names no file for lm_head\.weight"):
        resolve_model(str(folder))


@pytest.mark.parametrize("decoder", [{"11": 3}, {"11": {}}, {"x": {"content": "</s>"}}, [3]])
def test_added_tokens_that_are_damaged_are_told(folder: Path, decoder: Any) -> None:
    settings = {"eos_token": "</s>", "added_tokens_decoder": decoder}
    write(folder, "tokenizer_config.json", settings)
    with pytest.raises(ModelError, match="added tokens cannot be read"):
        resolve_model(str(folder))


def test_resolving_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from herder.checkpoint.source import resolve_model; "
        "resolve_model('qwen3-8b'); "
        "print([m for m in ('torch', 'numpy', 'transformers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
