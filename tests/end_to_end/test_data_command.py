"""`herder data` as a user runs it, on a small corpus of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from herder.cli.main import run
from herder.data.order import epoch_order

RECIPE = """
model:
  config:
    architectures: [LlamaForCausalLM]
    model_type: llama
    vocab_size: 512
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 1
    num_attention_heads: 2
    max_position_embeddings: 128
    rms_norm_eps: 1.0e-5
  initialize: random
data: {{source: {corpus}, tokenizer: {tokenizer}, validation_fraction: 0.1}}
train: {{sequence_length: 64, micro_batch_size: 2, global_batch_tokens: 256}}
"""


@pytest.fixture
def recipe(tmp_path: Path, small_tokenizer_json: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERDER_CACHE", str(tmp_path / "cache"))
    corpus, tokenizer = tmp_path / "corpus.txt", tmp_path / "tokenizer.json"
    fox = "The quick brown fox number {} jumps over the lazy dog, again and again. "
    corpus.write_text("\n\n".join(fox.format(index) * (1 + index % 9) for index in range(120)))
    tokenizer.write_text(small_tokenizer_json)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(corpus=corpus, tokenizer=tokenizer))
    return path


def test_prepare_tells_the_figures_and_the_second_time_finds_them(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summaries = []
    for _ in range(2):
        assert run(["data", "prepare", str(recipe), "--json"]) == 0
        summaries.append(json.loads(capsys.readouterr().out))
    assert summaries[0] == summaries[1]
    figures = summaries[0]
    assert figures["num_documents"] + figures["num_validation_documents"] == 120
    assert sum(each["num_tokens"] for each in figures["lengths"]) == figures["num_tokens"]
    assert 0.9 < figures["utilization"] <= 1
    assert Path(figures["folder"], "train.tokens").is_file()


def test_inspect_shows_lengths_packing_and_a_row_as_text(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "inspect", str(recipe)]) == 0
    shown = capsys.readouterr().out
    for words in ("utilization", "share of tokens", "Row 0, which", "quick brown fox"):
        assert words in shown


def test_inspect_shows_rows_in_the_order_in_which_training_reads_them(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "prepare", str(recipe), "--json"]) == 0
    num_rows = json.loads(capsys.readouterr().out)["num_rows"]
    order = epoch_order(num_rows, seed=0, epoch=0).tolist()
    for row in (0, 1, num_rows - 1):
        assert run(["data", "inspect", str(recipe), "--row", str(row)]) == 0
        assert f"Row {row}, which is packed as number {order[row]}:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "data.source=nowhere.txt"], "No corpus 'nowhere.txt'"),
        (["--set", "data.tokenizer=nowhere"], "No tokenizer at nowhere"),
        (["--set", "data.tokenizer=null"], "set data.tokenizer"),
    ],
)
def test_what_is_missing_is_named(
    recipe: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "prepare", str(recipe), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_an_empty_corpus_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recipe.parent / "corpus.txt").write_text("\n\n")
    assert run(["data", "prepare", str(recipe)]) == 2
    assert "is empty" in capsys.readouterr().err


def test_fetching_an_unknown_name_lists_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "fetch", "wikipedia-lead"]) == 2
    assert "Did you mean 'wikipedia-leads'?" in capsys.readouterr().err


def test_a_step_is_shown_by_the_documents_it_read_and_where_they_are(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = (recipe.parent / "corpus.txt").read_bytes()
    seen = list[dict[str, object]]()
    for step in ("1", "2"):
        assert run(["data", "inspect", str(recipe), "--step", step, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["step"] == int(step)
        assert {each["micro_batch"] for each in told["documents"]} == {0, 1}
        assert 200 < sum(each["num_tokens"] for each in told["documents"]) <= 256
        seen += told["documents"]
    for each in seen:
        there = corpus[each["byte_offset"] :].split(b"\n\n")[0].decode()
        text = str(each["text"]).removesuffix("<|endoftext|>")
        assert text in there
        assert (each["first_token"] == 0) == there.startswith(text)
        line = corpus[: each["byte_offset"]].count(b"\n") + 1
        assert each["entry"] == f"line {line}"
    assert run(["data", "inspect", str(recipe), "--step", "1"]) == 0
    assert "corpus.txt, line" in capsys.readouterr().out.replace("\n", "")


def test_what_a_run_read_is_shown_only_while_the_source_holds_it(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = recipe.parent / "run"
    words = [f"run_directory={out}", "train.steps=2", "evaluate.every_steps=null"]
    settings = [word for each in words for word in ("--set", each)]
    assert run(["train", str(recipe), *settings]) == 0
    capsys.readouterr()
    shown = list[str]()
    for what in (recipe, out):
        assert run(["data", "inspect", str(what), "--step", "2", "--json"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    with (recipe.parent / "corpus.txt").open("a") as file:
        file.write("\n\nOne more document.")
    assert run(["data", "inspect", str(out), "--step", "2"]) == 2
    assert "read other documents than" in capsys.readouterr().err


def test_a_recipe_that_leaves_a_steps_size_to_the_plan_is_told_so(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--set", "train.micro_batch_size=null"]
    assert run(["data", "inspect", str(recipe), "--step", "2", *given]) == 2
    assert "leaves the size of a step to the plan" in capsys.readouterr().err
