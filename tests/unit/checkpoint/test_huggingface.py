from __future__ import annotations

import json
import resource
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from herder.checkpoint.huggingface import (
    load_decoder,
    load_weights,
    save_huggingface,
    stored_dtype,
)
from herder.checkpoint.source import ModelSource, resolve_model
from herder.config.architecture import LayerSpec
from herder.errors import CheckpointError, ModelError, WeightsError
from herder.model.build import build_decoder, materialize
from herder.model.decoder import Decoder

MakeDecoder = Callable[..., Decoder]


@pytest.fixture
def saved(make_decoder: MakeDecoder, tmp_path: Path) -> Path:
    save_huggingface(make_decoder("llama"), tmp_path / "tiny", family="llama")
    return tmp_path / "tiny"


def change(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(resolve_model(str(folder)), dtype=dtype)


def same_parameters(a: Decoder, b: Decoder) -> bool:
    others = dict(b.named_parameters())
    return all(torch.equal(each, others[name]) for name, each in a.named_parameters())


def test_a_saved_model_loads_with_the_same_parameters(
    saved: Path, make_decoder: MakeDecoder
) -> None:
    decoder = make_decoder("llama")
    loaded = load(saved)
    assert loaded.config == decoder.config
    assert same_parameters(decoder, loaded)
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_shards_are_cut_by_size_indexed_and_read_back(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    decoder = make_decoder("llama")
    save_huggingface(decoder, tmp_path / "cut", family="llama", shard_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "cut" / name).stat().st_size < 45_000 for name in files)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in decoder.parameters())
    assert same_parameters(decoder, load(tmp_path / "cut"))


def test_weights_are_cast_on_the_way_in_and_saved_as_they_are(saved: Path, tmp_path: Path) -> None:
    decoder = load(saved, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    save_huggingface(decoder, tmp_path / "half", family="llama")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    source = resolve_model(str(tmp_path / "half"))
    assert stored_dtype(source) == torch.bfloat16
    assert same_parameters(decoder, load_decoder(source, dtype=torch.bfloat16))


def test_a_decoder_that_has_memory_is_filled_in_place(saved: Path) -> None:
    source = resolve_model(str(saved))
    decoder = build_decoder(source.architecture)
    materialize(decoder, device="cpu")
    before = {name: parameter.data_ptr() for name, parameter in decoder.named_parameters()}
    load_weights(decoder, source, device="cpu")
    assert before == {name: each.data_ptr() for name, each in decoder.named_parameters()}
    assert same_parameters(decoder, load(saved))


def test_a_tied_model_stays_tied_through_loading_and_a_step(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    save_huggingface(
        make_decoder("llama", tie_word_embeddings=True), tmp_path / "tied", family="llama"
    )
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    decoder = load(tmp_path / "tied")
    assert decoder.embed is not None
    assert decoder.head is not None
    assert decoder.head.weight is decoder.embed.weight
    before = decoder.embed.weight.detach().clone()
    decoder.head.weight.sum().backward()
    torch.optim.SGD(decoder.parameters(), lr=0.5).step()
    torch.testing.assert_close(decoder.embed.weight, before - 0.5)


@pytest.mark.parametrize("held", ["head only", "both, equal"])
def test_a_tied_model_loads_from_every_form_it_is_published_in(
    held: str, make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    decoder = make_decoder("llama", tie_word_embeddings=True)
    save_huggingface(decoder, tmp_path / "tied", family="llama")

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if held == "head only":
            del tensors["model.embed_tokens.weight"]

    change(tmp_path / "tied", edit)
    assert same_parameters(decoder, load(tmp_path / "tied"))


def test_two_different_matrices_are_both_kept_and_the_user_is_warned(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    decoder = make_decoder("llama", tie_word_embeddings=True)
    save_huggingface(decoder, tmp_path / "tied", family="llama")

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    change(tmp_path / "tied", edit)
    with pytest.warns(UserWarning, match="differ; the model is read as not tied"):
        loaded = load(tmp_path / "tied")
    assert loaded.embed is not None
    assert loaded.head is not None
    assert torch.equal(loaded.head.weight, loaded.embed.weight * 2)
    save_huggingface(loaded, tmp_path / "again", family="llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_parameters(loaded, load(tmp_path / "again"))


def test_everything_wrong_is_told_together_and_nothing_is_loaded(saved: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(48)
        tensors["lm_head.weight"] = torch.ones(161, 48)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(48, 80)

    change(saved, edit)
    source = resolve_model(str(saved))
    decoder = build_decoder(source.architecture)
    with pytest.raises(WeightsError) as caught:
        load_weights(decoder, source, device="cpu")
    message = str(caught.value)
    for part in (
        "1 missing: model.norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "2 tensors have another shape",
        "lm_head.weight is [161, 48], the architecture needs [160, 48]",
        "model.layers.1.mlp.up_proj.weight is [48, 80], the architecture needs [80, 48]",
    ):
        assert part in message
    assert all(parameter.is_meta for parameter in decoder.parameters())


def test_missing_and_damaged_shards_are_told_together(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    folder = tmp_path / "cut"
    save_huggingface(make_decoder("llama"), folder, family="llama", shard_bytes=40_000)
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(WeightsError) as caught:
        load(folder)
    message = str(caught.value)
    assert f"{first} cannot be read" in message
    assert f"{second} is damaged: it is cut short" in message


def test_quantized_dtypes_are_refused_where_the_config_says_nothing_of_them(saved: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    change(saved, edit)
    with pytest.raises(WeightsError, match=r"up_proj: config.json does not say .* weight I8"):
        load(saved)


def test_a_model_without_weights_says_what_would_do() -> None:
    with pytest.raises(WeightsError, match="has no weights here"):
        load_decoder(resolve_model("smollm2-135m"))


def peak_bytes() -> int:
    """The most memory this process has held since it was last asked to forget that."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def held_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "hidden_size", "intermediate_size"), [("llama", 480, 2000), ("mixtral", 240, 500)]
)
def test_loading_holds_one_tensor_besides_the_model(
    family: str,
    hidden_size: int,
    intermediate_size: int,
    stored: torch.dtype,
    make_decoder: MakeDecoder,
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    decoder = make_decoder(family, num_hidden_layers=8, **sizes)
    save_huggingface(decoder.to(stored), tmp_path / "big", family=family)
    model_bytes = 4 * sum(parameter.numel() for parameter in decoder.parameters())
    largest_bytes = 4 * max(parameter.numel() for parameter in decoder.parameters())
    assert model_bytes > 20 * largest_bytes
    source = resolve_model(str(tmp_path / "big"))
    Path("/proc/self/clear_refs").write_text("5")
    before = held_bytes()
    loaded = load_decoder(source)
    assert peak_bytes() - before < model_bytes + 4 * largest_bytes
    del loaded


def test_a_full_folder_is_never_written_over(saved: Path, make_decoder: MakeDecoder) -> None:
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists already and is not empty"):
        save_huggingface(make_decoder("llama"), saved, family="llama")
    assert (saved / "model.safetensors").read_bytes() == before


@contextmanager
def largest_file(num_bytes: int) -> Generator[None]:
    """The system refuses to write files longer than this, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_that_cannot_be_finished_leaves_nothing(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    decoder = make_decoder("llama")
    with (
        largest_file(50_000),
        pytest.raises(CheckpointError, match=r"could not be written: .*needs .* free: "),
    ):
        save_huggingface(decoder, tmp_path / "out", family="llama")
    assert list(tmp_path.iterdir()) == []


def test_what_the_family_cannot_express_is_refused_before_anything_is_written(
    make_decoder: MakeDecoder, tmp_path: Path
) -> None:
    decoder = make_decoder("llama")
    windowed = (LayerSpec(attention="sliding", window=4), LayerSpec())
    decoder.config = decoder.config.model_copy(update={"layers": windowed})
    with pytest.raises(ModelError, match="would not keep layers"):
        save_huggingface(decoder, tmp_path / "out", family="llama")
    assert list(tmp_path.iterdir()) == []


def test_token_ids_generation_defaults_and_tokenizer_files_go_along(
    saved: Path, tmp_path: Path
) -> None:
    source: ModelSource = replace(
        resolve_model(str(saved)),
        config_json={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None},
        eos_token_ids=(2, 7),
        generation={"temperature": 0.6},
    )
    (saved / "tokenizer.json").write_text('{"x": 1}')
    (saved / "chat_template.jinja").write_text("hello")
    save_huggingface(load(saved), tmp_path / "out", family="llama", like=source)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"temperature": 0.6, "bos_token_id": 1, "eos_token_id": [2, 7]}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"x": 1}'
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "hello"
