"""`herder convert` as a user runs it: every form of a model into the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from herder.checkpoint.huggingface import load_decoder, save_huggingface
from herder.checkpoint.source import resolve_model
from herder.cli.main import run
from herder.families.registry import architecture_from_hf, families
from herder.model.attend import PackedAttend
from herder.model.build import build_decoder, initialize_weights, materialize


@pytest.fixture
def folder(tmp_path: Path, small_tokenizer_json: str) -> Path:
    """A Hugging Face folder of a tiny Llama with a tokenizer."""
    config = {**families()["llama"].tiny_config(), "vocab_size": 400}
    decoder = build_decoder(families()["llama"].from_hf(config, "llama"))
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=0)
    target = tmp_path / "tiny"
    save_huggingface(decoder, target, family="llama")
    (target / "tokenizer.json").write_text(small_tokenizer_json)
    (target / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (target / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    return target


def convert(*arguments: object) -> int:
    return run(["convert", *map(str, arguments)])


def test_a_folder_becomes_a_run_and_a_folder_again_with_the_same_tensors(
    folder: Path, tmp_path: Path
) -> None:
    assert convert(folder, tmp_path / "run") == 0
    source = resolve_model(str(tmp_path / "run"))
    assert (source.weights, source.eos_token_ids) == ("run", (1, 3))
    assert convert(tmp_path / "run", tmp_path / "again") == 0
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokenizer = "tokenizer.json"
    assert (tmp_path / "again" / tokenizer).read_text() == (folder / tokenizer).read_text()
    assert resolve_model(str(tmp_path / "again")).eos_token_ids == (1, 3)


@pytest.mark.parametrize("family", families())
def test_every_family_becomes_a_run_and_a_folder_again(family: str, tmp_path: Path) -> None:
    decoder = build_decoder(architecture_from_hf(families()[family].tiny_config(), name=family))
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=0)
    for buffer in decoder.buffers():
        buffer.normal_()
    save_huggingface(decoder, tmp_path / "tiny", family=family)
    assert convert(tmp_path / "tiny", tmp_path / "run") == 0
    assert convert(tmp_path / "run", tmp_path / "again") == 0
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("tiny", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_precision_is_that_of_the_file_unless_another_is_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half"
    assert convert(folder, half, "--to", "huggingface", "--precision", "bf16") == 0
    assert {each.dtype for each in load_file(half / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert convert(half, tmp_path / "run") == 0
    assert convert(tmp_path / "run", tmp_path / "half again") == 0
    again = load_file(tmp_path / "half again" / "model.safetensors")
    assert {each.dtype for each in again.values()} == {torch.bfloat16}


@pytest.mark.parametrize("form", ["huggingface", "run"])
def test_a_target_that_holds_something_is_refused(
    folder: Path, tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").touch()
    assert convert(folder, target, "--to", form) == 2
    assert "exists already and is not empty" in capfd.readouterr().err
    assert [path.name for path in target.iterdir()] == ["precious"]
    assert convert(folder, target / "precious", "--to", form) == 2
    assert "exists already and is not empty" in capfd.readouterr().err


def test_a_truncated_file_is_refused_and_leaves_nothing(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert convert(folder, tmp_path / "out", "--to", "huggingface") == 2
    assert "cut short" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_catalog_name_has_nothing_to_convert(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert convert("llama-2-7b", tmp_path / "out") == 2
    assert "has no weights here" in capfd.readouterr().err


@pytest.mark.package_data
def test_the_real_gguf_file_becomes_a_folder_that_transformers_reads_with_its_tokenizer(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    target = tmp_path / "smollm2"
    assert convert(smollm2_gguf, target) == 0
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(target)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    decoder = load_decoder(resolve_model(str(smollm2_gguf)))
    length = ids.shape[1]
    with torch.inference_mode():
        theirs = model(ids).logits[0]
        own = decoder(ids[0], positions_T=torch.arange(length), attend=PackedAttend([length]))
        answer = model.generate(ids, do_sample=False, max_new_tokens=8)[0, length:]
    assert (own - theirs).abs().max() < 3e-4
    assert "Paris" in tokenizer.decode(answer)
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 2
