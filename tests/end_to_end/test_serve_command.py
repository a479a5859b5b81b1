"""`herder serve` as a user runs it: a process, signals, exit statuses."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from herder.cli.main import run
from herder.serve.load import precision_of

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `herder serve` with the given arguments; nothing is left running."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        program = "from herder.cli.main import main; main()"
        command = [sys.executable, "-c", program, "serve", *arguments]
        process = subprocess.Popen(
            command,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=10)


def read_banner(process: subprocess.Popen[str]) -> str:
    """What is said on stdout, up to the example command."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "curl" in line:
            return "".join(lines)
    raise AssertionError(process.communicate()[1])


def test_the_banner_tells_where_what_and_how_and_its_example_works(
    start: Start, tiny_chat_model: Path
) -> None:
    process = start(str(tiny_chat_model), "--port", "0", "--max-model-len", "128")
    banner = read_banner(process)
    found = re.search(r"tiny-chat is served at (http://127\.0\.0\.1:\d+)\n", banner)
    assert found is not None, banner
    url = found.group(1)
    assert f"precision {precision_of('auto')} on" in banner
    assert "window 128 tokens" in banner
    assert re.search(r"key-value cache [\d.]+ (MB|GB)", banner)
    assert "up to 64 requests at once" in banner
    path, body = re.search(r"curl \S+?(/v1/\S+) .* -d '(.*)'", banner).groups()
    answer = httpx.post(f"{url}{path}", json=json.loads(body), timeout=30)
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert client.models.list().data[0].max_model_len == 128
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (0, "", "loading tiny-chat\n")


def test_a_term_signal_lets_the_accepted_answer_finish(start: Start, tiny_chat_model: Path) -> None:
    process = start(str(tiny_chat_model), "--port", "0")
    url = re.search(r"http://\S+", read_banner(process)).group()
    body = {"prompt": "The", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        chunks = stream.iter_text()
        first = next(chunks)
        process.send_signal(signal.SIGTERM)
        text = first + "".join(chunks)
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason": "length"' in text
    assert process.wait(30) == 0


def test_a_port_in_use_ends_with_status_2_before_anything_is_loaded(
    tiny_chat_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["serve", str(tiny_chat_model), "--port", port]) == 2
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert stderr == (
        f"herder: port {port} on 127.0.0.1 is in use. Choose another with --port {int(port) + 1}, "
        "or --port 0 for any free one.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", "100000"], "max_model_len=100000 exceeds the window of .* 256 tokens"),
        (["--port", "70000"], "70000"),
        (["--precision", "int8"], "int8"),
        (["--max-queued-requests", "0"], "0"),
    ],
)
def test_a_bad_flag_ends_with_status_2(
    tiny_chat_model: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert run(["serve", str(tiny_chat_model), *arguments]) == 2
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert re.search(message, stderr)
    assert "Traceback" not in stderr


def test_weights_that_cannot_be_read_end_with_status_2(
    tiny_chat_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in tiny_chat_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert run(["serve", str(tmp_path), "--port", "0"]) == 2
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert "model.safetensors" in stderr
    assert "Traceback" not in stderr
