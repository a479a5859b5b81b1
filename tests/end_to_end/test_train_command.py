"""`herder train` as a user runs it: from nothing, interrupted, killed, resumed, refused."""

import json
import random
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import yaml

from herder.checkpoint.directory import list_checkpoints, newest_checkpoint, step_of
from herder.checkpoint.manifest import verify_manifest
from herder.checkpoint.metadata import read_meta
from herder.checkpoint.verdict import read_verdict
from herder.cli.main import run
from herder.observe.events import (
    CheckpointLoaded,
    Event,
    Incident,
    Notice,
    RunFinished,
    RunInterrupted,
    RunStarted,
    StepFinished,
)
from herder.observe.sinks import read_events

HERDER = (sys.executable, "-c", "from herder.cli.main import main; main()")
STEPS = 60
WAIT_SECONDS = 120
WORDS = ("herd", "sheep", "wolf", "gate", "field", "rain", "night", "bell", "hill", "dog")


@dataclass(frozen=True)
class Runs:
    """A recipe and how to call `herder train` with it."""

    recipe: Path

    def arguments(self, name: str, *overrides: str) -> list[str]:
        """Of a call that trains in a run directory of that name, with more overrides."""
        chosen = (f"run_directory={self.directory(name)}", *overrides)
        return ["train", str(self.recipe), *(flag for each in chosen for flag in ("--set", each))]

    def start(self, name: str) -> subprocess.Popen[str]:
        """Start training in a process of its own."""
        return subprocess.Popen(
            [*HERDER, *self.arguments(name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, *overrides: str) -> int:
        """The exit status of a whole call, in this process."""
        return run(self.arguments(name, *overrides))

    def directory(self, name: str) -> Path:
        return self.recipe.parent / name

    def events(self, name: str) -> list[Event]:
        return list(read_events(self.directory(name) / "events.jsonl"))

    def losses(self, name: str) -> dict[int, float]:
        return {e.step: e.loss for e in self.events(name) if isinstance(e, StepFinished)}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    small_tokenizer_json: str,
    fresh_cache: Callable[[Path, pytest.MonkeyPatch], None],
) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("train")
    (folder / "tokenizer.json").write_text(small_tokenizer_json)
    chooser = random.Random(1)
    paragraphs = [" ".join(chooser.choices(WORDS, k=chooser.randint(5, 60))) for _ in range(80)]
    (folder / "text.txt").write_text("\n\n".join(paragraphs))
    recipe = {
        "model": {
            "initialize": "random",
            "config": {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 400,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
                "hidden_act": "silu",
            },
        },
        "data": {
            "source": str(folder / "text.txt"),
            "tokenizer": str(folder / "tokenizer.json"),
            "validation_fraction": 0.2,
        },
        "train": {
            "steps": STEPS,
            "sequence_length": 64,
            "micro_batch_size": 2,
            "global_batch_tokens": 512,
            "precision": "fp32",
            "schedule": {"kind": "cosine", "warmup_steps": 5},
        },
        "checkpoint": {"every_steps": 10, "keep_last": 2},
        "observe": {"tensorboard": False},
        "evaluate": {"every_steps": 30},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        fresh_cache(folder / "cache", patch)
        yield Runs(path)


@pytest.fixture(scope="module")
def unbroken(runs: Runs) -> dict[int, float]:
    """Losses of a run that nothing happens to."""
    assert runs.run("unbroken") == 0
    return runs.losses("unbroken")


def when(process: subprocess.Popen[str], is_true: Callable[[], bool]) -> None:
    """Wait until something holds while the process runs."""
    until = time.monotonic() + WAIT_SECONDS
    while not is_true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.005)


def test_what_is_saved_while_the_run_looks_broken_is_passed_over(runs: Runs) -> None:
    judge = ("gradient_deviations=0.000001", "minimum_steps=12", "window_steps=12")
    strict = [f"checkpoint.judge.{each}" for each in judge]
    assert runs.run("broken", "train.steps=24", *strict) == 0
    *good, last = list_checkpoints(runs.directory("broken"))
    assert [step_of(path) for path in (*good, last)] == [10, 20, 24], "two that are good"
    reason = read_verdict(last).tainted
    assert reason is not None
    assert reason.startswith("gradient norm")
    assert "run_looks_broken" in {e.kind for e in runs.events("broken") if isinstance(e, Incident)}
    assert runs.run("broken", "train.steps=40") == 0
    events = runs.events("broken")
    assert [e.step for e in events if isinstance(e, CheckpointLoaded)] == [20]
    (told,) = [e for e in events if isinstance(e, Incident) and e.kind == "tainted_checkpoint"]
    assert f"step-00000024 is tainted: {reason}. Passed over" in told.message


def test_a_run_from_nothing_leaves_what_its_users_need(
    runs: Runs, unbroken: dict[int, float]
) -> None:
    folder = runs.directory("unbroken")
    assert sorted(unbroken) == list(range(1, STEPS + 1))
    assert unbroken[STEPS] < unbroken[1] - 1
    assert [step_of(path) for path in list_checkpoints(folder)] == [50, 60]
    kinds = [type(event).__name__ for event in runs.events("unbroken")]
    assert (kinds[0], kinds[-1]) == ("RunStarted", "RunFinished")
    assert kinds.count("EvaluationFinished") == 2
    assert "Incident" not in kinds, "nothing that learns is judged broken"
    meta = json.loads((folder / "experiment_meta.json").read_text())
    plan = json.loads((folder / "plan.json").read_text())
    started = runs.events("unbroken")[0]
    assert isinstance(started, RunStarted)
    assert meta["config_hash"] == started.config_hash
    assert meta["plan"] == plan
    assert plan["parameters"] == started.parameters
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["steps"] == STEPS


def test_sigterm_saves_and_the_same_command_goes_on_as_if_nothing_had_happened(
    runs: Runs, unbroken: dict[int, float]
) -> None:
    process = runs.start("broken run")
    when(process, lambda: len(_lines(runs, "broken run")) >= 3)
    process.terminate()
    out, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 143, err
    interrupted = runs.events("broken run")[-1]
    assert isinstance(interrupted, RunInterrupted)
    assert interrupted.signal == "SIGTERM"
    newest = newest_checkpoint(
        runs.directory("broken run"), verify=partial(verify_manifest, reads_contents=True)
    )
    assert newest is not None
    assert step_of(newest) == interrupted.step < STEPS
    assert f"stopped after step {interrupted.step} of {STEPS}. Go on with:" in out

    told = shlex.split(out.split("Go on with:\n")[1])
    assert told[0] == "herder"
    assert run(told[1:]) == 0
    assert runs.losses("broken run") == unbroken
    for name in ("model", "optimizer"):
        path = f"checkpoints/step-{STEPS:08d}/{name}.safetensors"
        resumed = (runs.directory("broken run") / path).read_bytes()
        assert resumed == (runs.directory("unbroken") / path).read_bytes()


def test_a_second_job_in_one_run_directory_is_refused_and_the_first_goes_on(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    process = runs.start("twice")
    when(process, lambda: len(_lines(runs, "twice")) >= 2)
    assert runs.run("twice") == 2
    assert f"another process (id {process.pid}) is training in" in capsys.readouterr().err
    process.terminate()
    _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 143, err


def test_kill_9_loses_no_more_than_the_steps_since_the_last_checkpoint(
    runs: Runs, unbroken: dict[int, float]
) -> None:
    process = runs.start("killed")
    when(process, lambda: bool(list_checkpoints(runs.directory("killed"))))
    process.kill()
    process.communicate()
    assert runs.run("killed") == 0
    loaded = [event for event in runs.events("killed") if isinstance(event, CheckpointLoaded)]
    assert len(loaded) == 1
    assert loaded[0].step >= 10
    assert runs.losses("killed") == unbroken


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runs.run("damaged", "train.steps=20") == 0
    newest = list_checkpoints(runs.directory("damaged"))[-1]
    assert step_of(newest) == 20
    (newest / "model.safetensors").write_bytes(b"not what was written")
    assert runs.run("damaged", "train.steps=22") == 0
    err = capsys.readouterr().err
    assert "incident" in err
    assert "model.safetensors has 20 bytes" in err
    events = runs.events("damaged")
    assert [e.kind for e in events if isinstance(e, Incident)] == ["damaged_checkpoint"]
    assert [e.step for e in events if isinstance(e, CheckpointLoaded)] == [10]
    assert (runs.directory("damaged") / "checkpoints" / "damaged-step-00000020").is_dir()
    assert 22 in runs.losses("damaged")


def test_a_finished_run_says_so_and_is_left_alone(
    runs: Runs, unbroken: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert runs.run("unbroken") == 0
    told = capsys.readouterr()
    assert "has done 60 steps of 60: nothing is left to do" in told.err
    assert "herder evaluate" in told.out
    assert runs.losses("unbroken") == unbroken


def test_a_run_goes_on_by_its_folder_alone_and_tells_what_is_other_than_it_was(
    runs: Runs, unbroken: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert unbroken
    assert runs.run("short", "train.steps=20", "train.schedule.kind=constant") == 0
    folder = runs.directory("short").rename(runs.directory("moved"))
    assert run(["train", "--resume", str(folder)]) == 0
    assert "has done 20 steps of 20: nothing is left to do" in capsys.readouterr().err
    assert run(["train", "--resume", str(folder), "--set", "train.steps=22"]) == 0
    assert sorted(runs.losses("moved")) == list(range(1, 23))
    notices = [event.message for event in runs.events("moved") if isinstance(event, Notice)]
    assert any("since step 20: train.steps 20 -> 22: the learning rate" in each for each in notices)
    assert any("short' -> " in each and "changes no results" in each for each in notices)
    assert "note: changed since step 20: train.steps 20 -> 22" in capsys.readouterr().err
    seed = ["--set", "train.seed=7"]
    assert run(["train", "--resume", str(folder), *seed]) == 2
    assert "train.seed: 0 there, 7 now" in capsys.readouterr().err
    meta = json.loads((list_checkpoints(folder)[-1] / "experiment_meta.json").read_text())
    assert {"herder", "python", "torch", "numpy", "safetensors", "tokenizers"} <= set(
        meta["versions"]
    )
    assert meta["hardware"]["num_ranks"] == meta["hardware"]["num_nodes"] == 1
    assert meta["hardware"]["cpu"]
    assert meta["corpus"] == read_meta(runs.directory("unbroken")).corpus


def test_a_run_without_a_checkpoint_starts_again(runs: Runs) -> None:
    assert runs.run("early", "train.steps=2", "train.schedule.warmup_steps=0") == 0
    shutil.rmtree(runs.directory("early") / "checkpoints")
    assert run(["train", "--resume", str(runs.directory("early"))]) == 0
    events = runs.events("early")
    (notice,) = [event.message for event in events if isinstance(event, Notice)]
    assert notice.endswith("was started before and has no checkpoint: from the start again")
    assert [event.step for event in events if isinstance(event, StepFinished)] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed=7", "train.seed: 0 there, 7 now"),
        ("train.optimizer.learning_rate=0.1", "train.optimizer.learning_rate: 0.0003 there, 0.1"),
        ("model.config.hidden_size=128", "model.config.hidden_size: 64 there, 128 now"),
    ],
)
def test_another_config_is_refused_with_the_keys_that_differ(
    runs: Runs,
    unbroken: dict[int, float],
    override: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert runs.run("unbroken", override) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
    assert runs.losses("unbroken") == unbroken


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("cluster.nodes=2",), "can start ranks on its own node only"),
        (("train.schedule.warmup_steps=99",), "exceeds train.steps=60"),
        (("data.source=/no/such/file.txt",), "/no/such/file.txt"),
        (("model.config.vocab_size=300",), "vocab_size"),
        (("model.config.hidden_act=nothing",), "hidden_act"),
        (("train.stepz=3",), "Did you mean 'steps'?"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_a_message(
    runs: Runs,
    overrides: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert runs.run("refused", *overrides) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
    assert list_checkpoints(runs.directory("refused")) == []


def test_a_loss_that_is_not_finite_stops_the_run_with_an_incident(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = "train.optimizer.learning_rate=1e30"
    assert runs.run("exploding", rate, "train.schedule.warmup_steps=0") == 1
    err = capsys.readouterr().err
    assert "not finite" in err
    assert "lower train.optimizer.learning_rate" in err
    events = runs.events("exploding")
    assert [e.kind for e in events if isinstance(e, Incident)] == ["non_finite_step"]
    assert not any(isinstance(event, RunFinished) for event in events)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 100 kB, as if the disk were full: a checkpoint does not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_run_and_leaves_no_half_checkpoint(
    runs: Runs, unbroken: dict[int, float], small_files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unbroken, "the corpus is tokenized before files are limited"
    assert small_files is None
    assert runs.run("full") == 2
    err = capsys.readouterr().err
    assert "could not be written" in err
    assert "checkpoints are untouched" in err
    assert list((runs.directory("full") / "checkpoints").iterdir()) == []
    kinds = [e.kind for e in runs.events("full") if isinstance(e, Incident)]
    assert kinds == ["checkpoint_not_saved"]


def test_events_can_be_told_every_few_steps_and_at_the_end(runs: Runs) -> None:
    overrides = ("train.steps=6", "observe.log_every_steps=4", "evaluate.every_steps=null")
    assert runs.run("sparse", *overrides, "observe.tensorboard=true") == 0
    assert sorted(runs.losses("sparse")) == [4, 6]
    assert any((runs.directory("sparse") / "tensorboard").iterdir())


def test_the_debug_recipe_trains_as_shipped(
    runs: Runs, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    overrides = (
        f"run_directory={runs.directory('debug')}",
        f"data.source={runs.recipe.parent / 'text.txt'}",
        "train.steps=20",
        "observe.progress=none",
    )
    flags = [flag for each in overrides for flag in ("--set", each)]
    assert run(["train", "recipes/debug.yaml", *flags]) == 0
    losses = runs.losses("debug")
    assert losses[20] < losses[1] - 1


def test_a_mixture_of_experts_tells_its_routers_and_its_top_k_can_be_changed(
    runs: Runs,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(repository)
    overrides = (
        f"run_directory={runs.directory('moe')}",
        f"data.source={runs.recipe.parent / 'text.txt'}",
        "model.config.hidden_size=64",
        "train.steps=3",
        "train.schedule={kind: constant}",
        "train.sequence_length=64",
        "train.global_batch_tokens=256",
        "evaluate.every_steps=null",
        "observe.progress=none",
    )
    flags = [flag for each in overrides for flag in ("--set", each)]
    assert run(["train", "recipes/moe_debug.yaml", *flags]) == 0
    told = [json.loads(line) for line in _lines(runs, "moe")]
    routers = [event for event in told if event["event"] == "RouterStats"]
    assert [(event["step"], event["layer"]) for event in routers] == [
        (step, layer) for step in (1, 2, 3) for layer in (0, 1)
    ]
    assert all(sum(event["selections"]) == 2 * event["tokens"] for event in routers)
    assert (runs.directory("moe") / "experts.svg").read_text().startswith("<svg")
    capsys.readouterr()
    flags = ["--prompt", "herd", "--max-tokens", "3", "--json"]
    flags += ["--set", "moe.num_experts_per_token=1"]
    assert run(["generate", str(runs.directory("moe")), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["completion_tokens"] == 3
    wrong = ["--prompt", "a", "--set", "moe.num_experts_per_tokn=1"]
    assert run(["generate", str(runs.directory("moe")), *wrong]) == 2
    assert "Did you mean 'num_experts_per_token'" in capsys.readouterr().err


def test_a_run_directory_is_a_model(
    runs: Runs, unbroken: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert unbroken
    folder = str(runs.directory("unbroken"))
    assert run(["generate", folder, "--prompt", "herd", "--max-tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def _lines(runs: Runs, name: str) -> list[str]:
    path = runs.directory(name) / "events.jsonl"
    return path.read_text().splitlines() if path.exists() else []
