"""`herder evaluate` as a user runs it, on a tiny random model and on the real small one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from herder.checkpoint.huggingface import save_huggingface
from herder.cli.main import run
from herder.families.registry import architecture_from_hf, families
from herder.model.build import build_decoder, initialize_weights, materialize


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, small_tokenizer_json: str) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = {**families()["llama"].tiny_config(), "vocab_size": 512, "initializer_range": 0.02}
    decoder = build_decoder(architecture_from_hf(config, name="tiny"))
    materialize(decoder, device="cpu")
    initialize_weights(decoder, seed=0)
    save_huggingface(decoder, folder, family="llama")
    (folder / "tokenizer.json").write_text(small_tokenizer_json)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    lines = (json.dumps({"text": f"The quick fox number {index} 今天"}) for index in range(100))
    path.write_text("\n".join(lines))
    return path


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["evaluate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_untrained_model_is_about_as_good_as_knowing_nothing(
    model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluated(capsys, str(model), "--data", str(corpus), "--split", "all")
    assert result["num_documents"] == 100
    assert result["loss"] == pytest.approx(math.log(512), rel=0.05)
    assert result["baselines"]["uniform"]["perplexity"] == pytest.approx(512)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    nats = result["loss"] * result["num_tokens"]
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / result["num_bytes"])


def test_held_out_documents_are_a_part_of_all(
    model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = evaluated(capsys, str(model), "--data", str(corpus))
    assert 0 < held_out["num_documents"] < 20
    assert held_out["split"] == "validation"


def test_bf16_comes_near_fp32(
    model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(model), "--data", str(corpus), "--max-tokens", "200", "--split", "all"]
    exact = evaluated(capsys, *arguments)
    rounded = evaluated(capsys, *arguments, "--precision", "bf16")
    assert rounded["num_tokens"] == exact["num_tokens"]
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=1e-2)
    assert rounded["loss"] != exact["loss"]


def test_a_quantized_model_is_shown_beside_itself(
    model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(model), "--data", str(corpus), "--max-tokens", "200", "--split", "all"]
    wide = evaluated(capsys, *arguments, "--precision", "bf16")
    found = evaluated(capsys, *arguments, "--quantization", "int4")
    assert found["precision"] == "bf16"
    assert found["quantization"] == "int4 in groups of 32"
    assert found["unquantized"]["loss"] == wide["loss"] != found["loss"]
    ratio = found["perplexity"] / wide["perplexity"]
    assert found["perplexity_ratio"] == pytest.approx(ratio)
    assert 0.9 < ratio < 1.1
    coarse = ["--quantization", "int8", "--quantization-group-size", "128"]
    assert run(["evaluate", *arguments, *coarse]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "int8 in groups of 128" in shown
    assert "x the perplexity of bf16" in shown


def test_shorter_pieces_know_less_of_what_came_before(
    model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(model), "--data", str(corpus), "--split", "all"]
    whole = evaluated(capsys, *arguments)
    cut = evaluated(capsys, *arguments, "--sequence-length", "2")
    assert cut["num_tokens"] == whole["num_tokens"]
    assert cut["loss"] != whole["loss"]


def test_people_see_a_table_with_the_baselines(
    model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", str(model), "--data", str(corpus), "--split", "all"]) == 0
    shown = capsys.readouterr().out
    for words in ("Perplexity on", "unigram", "uniform", "tiny"):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "perplexitty"], "Did you mean 'perplexity'?"),
        (["--tasks", "perplexity,hellaswag"], "unknown task 'hellaswag'. Known: perplexity."),
        (["--max-tokens", "0"], "0 is not in the range"),
        (["--sequence-length", "129"], "exceeds the model's window of 128 tokens"),
        (["--data", "nowhere.txt"], "No corpus 'nowhere.txt'"),
        (["--quantization", "int3"], "'int3' is not one of 'int8', 'int4'"),
        (["--quantization-group-size", "64"], "give --quantization int8 or int4 too"),
        (["--quantization", "int4", "--quantization-group-size", "48"], "48"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", str(model), *arguments, "--json"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_corpus_without_held_out_documents_says_what_would_do(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("only one document here")
    assert run(["evaluate", str(model), "--data", str(tmp_path / "one.txt")]) == 2
    assert "--split all" in capsys.readouterr().err


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(
    model: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = json.loads((model / "tokenizer.json").read_text())
    token = {"id": 600, "content": "<more>", "single_word": False, "lstrip": False}
    stored["added_tokens"].append({**token, "rstrip": False, "normalized": False, "special": True})
    stored["model"]["vocab"]["<more>"] = 600
    larger = corpus.parent / "larger"
    larger.mkdir()
    for file in model.iterdir():
        (larger / file.name).write_bytes(file.read_bytes())
    (larger / "tokenizer.json").write_text(json.dumps(stored))
    assert run(["evaluate", str(larger), "--data", str(corpus)]) == 2
    assert "vocab_size=512: 89 tokens have no embedding" in capsys.readouterr().err


@pytest.mark.package_data
@pytest.mark.usefixtures("smollm2_gguf", "wikipedia_leads")
def test_the_real_model_predicts_encyclopedia_text_far_better_than_word_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = evaluated(capsys, "smollm2-135m-instruct", "--max-tokens", "300")
    assert 10 < result["perplexity"] < 60
    assert result["bits_per_byte"] < 1.3
    assert result["perplexity"] < result["baselines"]["unigram"]["perplexity"]


@pytest.mark.full
@pytest.mark.package_data
@pytest.mark.usefixtures("smollm2_gguf", "wikipedia_leads")
@pytest.mark.parametrize(("name", "aim"), [("int8", 1.005), ("int4", 1.04)])
def test_quantized_the_real_model_predicts_nearly_as_well(
    name: str, aim: float, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluated(
        capsys, "smollm2-135m-instruct", "--max-tokens", "4096", "--quantization", name
    )
    assert result["num_tokens"] >= 4096
    assert 1 / aim < result["perplexity_ratio"] < aim
