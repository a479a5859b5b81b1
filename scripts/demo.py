"""`make demo`: the whole way from a plan to an answer, with the commands a user has.

Owns the order of the steps and what is shown between them; everything it does to a model it does by
running `herder`. All that it makes lies under runs/demo. It leaves no process behind.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
from rich.console import Console
from rich.table import Table

HERDER = str(Path(sys.executable).with_name("herder"))
RECIPE = "recipes/demo.yaml"
MODEL = "smollm2-135m-instruct"
CORPUS = "wikipedia-leads"
OUTPUT = Path("runs/demo")
RUN = OUTPUT / "train"
QUESTION = "What is the capital of France?"
BIG_CLUSTER = ("--nodes", "2048", "--gpus-per-node", "8", "--gpu", "h100-80gb")

INTERRUPT_AFTER_STEPS = 10
EVALUATED_TOKENS = "4096"
START_UP_SECONDS = 300
STOP_SECONDS = 180

console = Console()


class DemoError(Exception):
    """A step did not do what it is there to show."""


@dataclass
class Report:
    """What the summary at the end shows."""

    rows: list[tuple[str, float, str]] = field(default_factory=list)

    def step(self, title: str, action: Callable[[], str]) -> None:
        """Run one step under a heading, timed; its return value is the summary's result."""
        console.rule(f"[bold]{len(self.rows) + 1}. {title}", align="left")
        started = time.monotonic()
        result = action()
        self.rows.append((title, time.monotonic() - started, result))
        console.print()


def herder(*arguments: str) -> None:
    """Run one command as a user would, its output on this terminal."""
    show_command(arguments)
    status = subprocess.run([HERDER, *arguments]).returncode
    if status:
        raise DemoError(f"`herder {' '.join(arguments)}` ended with exit status {status}")


def herder_json(*arguments: str, keep: Path) -> dict[str, object]:
    """Run one command with --json; the object is returned and kept in a file."""
    show_command((*arguments, "--json"))
    done = subprocess.run([HERDER, *arguments, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise DemoError(f"`herder {' '.join(arguments)}` ended with status {done.returncode}")
    keep.write_text(done.stdout)
    return json.loads(done.stdout)


def show_command(arguments: tuple[str, ...]) -> None:
    console.print(f"[dim]$[/] [bold cyan]herder {' '.join(arguments)}", highlight=False)


def fetch() -> str:
    """Bring the model and the corpus into the cache."""
    herder("data", "fetch", MODEL, CORPUS)
    return "98 MB of weights, 10,033 Wikipedia leads"


def plan_this_machine() -> str:
    """Show what the demo's own run needs here."""
    herder("plan", "train", RECIPE, "-o", str(OUTPUT / "design.md"))
    plan = herder_json("plan", "train", RECIPE, keep=OUTPUT / "plan_here.json")
    return describe_plan(plan)


def plan_big_cluster() -> str:
    """Show the plan of a 405B model on 16,384 GPUs."""
    herder("plan", "train", "llama-3.1-405b", *BIG_CLUSTER)
    keep = OUTPUT / "plan_16384_h100.json"
    return describe_plan(herder_json("plan", "train", "llama-3.1-405b", *BIG_CLUSTER, keep=keep))


def describe_plan(plan: dict[str, object]) -> str:
    """One line of a plan's JSON."""
    layout, memory = plan["layout"], plan["memory_gb"]
    assert isinstance(layout, dict)
    assert isinstance(memory, dict)
    return (
        f"TP {layout['tensor_parallel_size']}, PP {layout['pipeline_parallel_size']}, "
        f"DP {layout['data_parallel_size']}, ZeRO-{layout['zero_stage']}, "
        f"state {memory['state']:.1f} GB a device"
    )


def train_and_interrupt() -> str:
    """Start training and press Ctrl-C on it after some steps, as an impatient person would."""
    show_command(("train", RECIPE))
    training = subprocess.Popen([HERDER, "train", RECIPE])
    try:
        while steps_done() < INTERRUPT_AFTER_STEPS:
            if training.poll() is not None:
                raise DemoError(f"training ended by itself with status {training.returncode}")
            time.sleep(0.2)
        training.send_signal(signal.SIGINT)
        training.wait(STOP_SECONDS)
    finally:
        stop(training)
    return f"interrupted after {steps_done()} steps, saved"


def resume() -> str:
    """The same command again goes on where it stopped."""
    before = steps_done()
    herder("train", RECIPE)
    if steps_done() <= before:
        raise DemoError(f"training did not go on after step {before}")
    return f"steps {before + 1} to {steps_done()}"


def events(kind: str) -> list[dict[str, float]]:
    """The run's events of one kind so far; a line still being written is left out."""
    path = RUN / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["event"] == kind]


def steps_done() -> int:
    return max((int(event["step"]) for event in events("StepFinished")), default=0)


def evaluate(model: str, name: str) -> float:
    """Perplexity of a model on the held-out documents."""
    keep = OUTPUT / f"perplexity_{name}.json"
    result = herder_json("evaluate", model, "--max-tokens", EVALUATED_TOKENS, keep=keep)
    perplexity = result["perplexity"]
    assert isinstance(perplexity, float)
    console.print(f"perplexity {name} training: [bold]{perplexity:.2f}")
    return perplexity


def ask() -> str:
    """Serve what was trained, ask it one thing with the official client, and stop the server."""
    with server(str(RUN)) as url:
        console.print(f"[dim]>>>[/] [bold]{QUESTION}")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=40,
            temperature=0,
        )
    text = (answer.choices[0].message.content or "").strip()
    if not text:
        raise DemoError("the server gave an empty answer")
    console.print(f"[green]{text}")
    return text


@contextmanager
def server(model: str) -> Generator[str]:
    """A server on a free port until the block ends; its log is kept."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ("serve", model, "--port", str(port))
    show_command(arguments)
    with (OUTPUT / "server.log").open("wb") as log:
        running = subprocess.Popen([HERDER, *arguments], stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/ready", running)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(running)


def wait_until_ready(url: str, running: subprocess.Popen[bytes]) -> None:
    """Poll until the model is loaded; DemoError if the server ends or takes too long."""
    deadline = time.monotonic() + START_UP_SECONDS
    while time.monotonic() < deadline:
        if running.poll() is not None:
            raise DemoError(f"the server ended, see {OUTPUT / 'server.log'}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    raise DemoError(f"the server was not ready in {START_UP_SECONDS} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, gently first."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def summarize(report: Report) -> None:
    """A table of what happened and where everything lies."""
    table = Table(title="What happened", title_justify="left")
    table.add_column("step")
    table.add_column("time", justify="right")
    table.add_column("result", overflow="fold")
    for title, seconds, result in report.rows:
        table.add_row(title, f"{seconds:.0f} s", result)
    table.add_section()
    table.add_row("all", f"{sum(row[1] for row in report.rows):.0f} s", "")
    console.print(table)
    console.print("What it made:")
    for path in sorted(OUTPUT.iterdir()):
        console.print(f"  {path}{'/' if path.is_dir() else ''}", highlight=False)
    console.print(f"Go on: herder generate {RUN} --prompt 'The Moon'", highlight=False)


def run_demo() -> None:
    """All steps in order; DemoError at the first that does not do what it should."""
    report = Report()
    perplexity: dict[str, float] = {}

    def measure(name: str, model: str) -> str:
        perplexity[name] = evaluate(model, name)
        return f"{perplexity[name]:.2f}"

    report.step("Fetch a model and a corpus", fetch)
    report.step("Plan for this machine", plan_this_machine)
    report.step("Plan for 16,384 H100s", plan_big_cluster)
    report.step("Perplexity before", lambda: measure("before", MODEL))
    report.step("Train, and be interrupted", train_and_interrupt)
    report.step("Resume", resume)
    report.step("Perplexity after", lambda: measure("after", str(RUN)))
    report.step("Serve and ask", ask)
    summarize(report)
    if perplexity["after"] >= perplexity["before"]:
        raise DemoError("training did not lower the perplexity on the held-out documents")


def main() -> int:
    """Run the demo in a fresh runs/demo; exit status 1 with a message when a step fails."""
    if OUTPUT.exists():
        shutil.rmtree(OUTPUT)
    OUTPUT.mkdir(parents=True)
    try:
        run_demo()
    except DemoError as failure:
        console.print(f"[bold red]The demo stopped:[/] {failure}")
        return 1
    except openai.OpenAIError as failure:
        console.print(f"[bold red]The demo stopped:[/] the server's answer: {failure}")
        return 1
    except KeyboardInterrupt:
        console.print("[bold red]Interrupted.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
