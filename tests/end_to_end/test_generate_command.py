"""`herder generate` as a user runs it."""

import json
import re
from pathlib import Path

import pytest

from herder.cli.main import run

PROMPT = "The quick brown"


@pytest.fixture
def generate(tiny_chat_model: Path, capfd: pytest.CaptureFixture[str]):
    """Runs the command in this process: status, stdout and stderr."""

    def generate(*arguments: str) -> tuple[int, str, str]:
        status = run(["generate", str(tiny_chat_model), "--precision", "fp32", *arguments])
        return (status, *capfd.readouterr())

    return generate


def test_text_goes_to_stdout_and_figures_to_stderr(generate) -> None:
    status, out, err = generate("--prompt", PROMPT, "--max-tokens", "12")
    assert status == 0
    assert out
    assert "12 new" in err or "finish reason stop" in err
    assert "--chat" in err


def test_json_is_one_object_with_the_same_text(generate) -> None:
    _, text, _ = generate("--prompt", PROMPT, "--max-tokens", "12")
    status, out, err = generate("--prompt", PROMPT, "--max-tokens", "12", "--json")
    report = json.loads(out)
    assert (status, err, report["text"] + "\n") == (0, "", text)
    assert report["finish_reason"] in ("stop", "length")
    assert report["completion_tokens"] <= 12
    assert report["tokens_per_second"] > 0


def test_greedy_and_seeded_answers_repeat(generate) -> None:
    greedy = [generate("--prompt", PROMPT)[1] for _ in range(2)]
    assert greedy[0] == greedy[1]
    drawn = [
        generate("--prompt", PROMPT, "--temperature", "1.5", "--seed", seed)[1]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_quantized_weights_answer_too(generate) -> None:
    arguments = ("--prompt", PROMPT, "--max-tokens", "12", "--quantization", "int8")
    status, text, _ = generate(*arguments)
    assert status == 0
    assert text


def test_a_chat_goes_through_the_template(generate) -> None:
    raw = json.loads(generate("--prompt", PROMPT, "--json")[1])
    chat = json.loads(generate("--prompt", PROMPT, "--chat", "--json")[1])
    assert chat["prompt_tokens"] > raw["prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt: has no tokens"),
        (["--prompt", "a", "--temperature", "nan"], "temperature: .* nan was given"),
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--top-p", "2"], "top_p"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens"),
        (["--prompt", "a", "--max-tokens", "1000"], "the model's window of 256 tokens"),
        (["--prompt", "a " * 400], "800 tokens leave no room .* of 256 tokens"),
        (["--prompt", "a", "--quantization-group-size", "64"], "give --quantization int8 or int4"),
        ([], "--prompt"),
    ],
)
def test_a_bad_request_ends_with_status_2_and_a_message(generate, arguments, message) -> None:
    status, out, err = generate(*arguments)
    assert (status, out) == (2, "")
    assert re.search(message, err), err
    assert "Traceback" not in err
