"""`herder train` when ranks are lost: they are started again, and nothing of the run is lost."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from herder.checkpoint.directory import CHECKPOINTS, list_checkpoints, step_of
from tests.end_to_end.training import HERDER, TORCHRUN, Training

EVERY_STEPS = 5


def losses(training: Training) -> dict[int, set[float]]:
    """By step, all values that were told of it: a step may have been done twice."""
    found = dict[int, set[float]]()
    for event in training.events("StepFinished"):
        found.setdefault(event["step"], set()).add(event["loss"])
    return found


def unbroken(recipe: Path, *settings: str) -> dict[int, set[float]]:
    """The losses of the same run that nobody disturbs, in a folder that is moved away."""
    with Training(recipe, *settings) as training:
        _, err = training.finish()
        assert training.process.returncode == 0, err
        found = losses(training)
    training.run_directory.rename(training.run_directory.with_name("unbroken"))
    return found


def newest(training: Training) -> int:
    """The newest checkpoint's step, 0 without any."""
    return max(map(step_of, list_checkpoints(training.run_directory)), default=0)


def kill_a_rank(training: Training, chance: random.Random) -> int:
    """Kill a rank at a moment drawn by chance: as ranks start, at a step, or as one is saved.

    How far the run was.
    """
    training.wait_until(lambda: len(training.rank_processes()) == 2)
    moment = chance.choice(["start", "step", "save"])
    if moment == "start":
        time.sleep(chance.uniform(0.0, 5.0))
    elif moment == "step":
        training.wait_for_steps(
            len(training.events("StepFinished")) + chance.randint(1, 2 * EVERY_STEPS)
        )
    else:
        saves = training.run_directory / CHECKPOINTS
        training.wait_until(lambda: any(saves.glob(".writing-*")))
    reached = max(losses(training), default=0)
    victims = training.rank_processes()
    chance.choice(victims).kill()
    training.wait_until(lambda: not any(each.is_running() for each in victims))
    return reached


def check_nothing_is_lost(
    training: Training, expected: dict[int, set[float]], num_kills: int
) -> None:
    """Every step's loss is the unbroken run's, however often it was done; what was done twice was
    not saved yet."""
    assert losses(training) == expected
    starts = [event["first_step"] for event in training.events("RunStarted")]
    lost = training.events("Incident")
    assert [each["kind"] for each in lost] == ["rank_lost"] * num_kills
    assert len(starts) <= num_kills + 1, "a start that is killed early says nothing"
    assert starts == sorted(starts), "no start goes back behind the one before"
    assert all(first % EVERY_STEPS == 0 for first in starts)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.full)])
def test_ranks_that_are_killed_at_any_moment_are_started_again_and_no_step_is_lost(
    kills: int, recipe: Path
) -> None:
    steps = 3 * EVERY_STEPS * kills
    saved = (
        *(f"train.steps={steps}", f"checkpoint.every_steps={EVERY_STEPS}"),
        f"restart.max_in_a_row={kills}",
    )
    expected = unbroken(recipe, *saved)
    chance = random.Random(kills)
    with Training(recipe, *saved) as training:
        for _ in range(kills):
            before = newest(training)
            reached = kill_a_rank(training, chance)
            assert newest(training) >= before
            assert reached - newest(training) <= 2 * EVERY_STEPS, "of a save that is under way"
        out, err = training.finish()
        assert training.process.returncode == 0, err
        assert f"done: {steps} steps" in out
        check_nothing_is_lost(training, expected, kills)


def test_a_rank_that_is_lost_twice_is_left_out_and_the_batches_stay_the_same(recipe: Path) -> None:
    four = (
        *("cluster.gpus_per_node=4", "restart.shrinks=true"),
        *("train.global_batch_tokens=512", "train.micro_batch_size=1"),
    )
    saved = (f"train.steps={6 * EVERY_STEPS}", f"checkpoint.every_steps={EVERY_STEPS}")
    expected = unbroken(recipe, *four, *saved)
    with Training(recipe, *four, *saved) as training:
        training.wait_until(lambda: newest(training) >= EVERY_STEPS)
        for _ in range(2):
            training.wait_until(lambda: len(training.rank_processes()) == 4)
            training.rank(3).kill()
            training.wait_until(lambda: len(training.rank_processes()) < 4)
        _, err = training.finish()
        assert training.process.returncode == 0, err
        assert "parameters on DP 3" in err
        assert "8 micro-batches on 3 data-parallel ranks, of which 1 compute an empty one" in err
        found = losses(training)
        assert found.keys() == expected.keys()
        for step, values in found.items():
            assert max(values) == pytest.approx(min(expected[step]), rel=1e-5)
            assert min(values) == pytest.approx(min(expected[step]), rel=1e-5)
        tokens = {event["tokens"] for event in training.events("StepFinished")}
        assert len(tokens) > 1, "packed documents differ in how many targets they have"
    with Training(recipe, *four, *saved) as again:
        again.finish()
        assert again.process.returncode == 0, "with four ranks again, of which none is left to do"


def test_a_loss_of_ranks_that_goes_on_is_told_and_ends_the_run(recipe: Path) -> None:
    with Training(recipe, "restart.max_in_a_row=1") as training:
        for _ in range(2):
            training.wait_until(lambda: len(training.rank_processes()) == 2)
            victim = training.rank(1)
            victim.kill()
            training.wait_until(lambda one=victim: not one.is_running())
        _, err = training.finish()
    assert training.process.returncode == 1
    assert err.count("herder: rank 1: dp 1: killed by SIGKILL") == 2
    assert err.count("starting 2 ranks from the start in 0 s, 1 of at most 1 times") == 1
    assert training.rank_processes() == []


@pytest.mark.parametrize("phase", ["start", "step", "save", "evaluation"])
def test_a_signal_ends_the_run_in_every_phase_with_what_was_done_saved(
    phase: str, recipe: Path
) -> None:
    """In one process; ranks agree on the signal between steps and between held-out batches."""
    alone = ("cluster.gpus_per_node=1", "data.validation_fraction=0.9")
    text = recipe.with_name("text.txt")
    text.write_text("\n\n".join(f"sheep {n} at the gate of the wolf" for n in range(50_000)))
    settings = [*alone, f"checkpoint.every_steps={EVERY_STEPS}"]
    if phase == "evaluation":
        settings += [f"evaluate.every_steps={EVERY_STEPS}", "evaluate.max_tokens=10000000"]
    with Training(recipe, *settings) as training:
        if phase == "start":
            assert training.process.stderr.readline(), "the plan is shown before torch is loaded"
        elif phase == "step":
            training.wait_for_steps(EVERY_STEPS - 2)
        elif phase == "save":
            saves = training.run_directory / CHECKPOINTS
            training.wait_until(lambda: any(saves.glob("*step-*")))
        else:
            training.wait_for_steps(EVERY_STEPS)
        training.process.send_signal(signal.SIGTERM)
        _, err = training.finish()
    assert training.process.returncode == 143, err
    done = max(losses(training), default=0)
    assert newest(training) == done, "the steps that were done are saved"
    assert (done == 0) == (phase == "start")
    assert not list(training.run_directory.glob("*/.writing-*"))
    told = training.events("RunInterrupted")
    assert [each["step"] for each in told] == [done]


@pytest.mark.full
def test_torchrun_starts_ranks_again_and_they_go_on(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    saved = (f"train.steps={12 * EVERY_STEPS}", f"checkpoint.every_steps={EVERY_STEPS}")
    expected = unbroken(recipe, *saved)
    launcher = (*TORCHRUN, "--max-restarts=2", "--monitor-interval=0.3", "--no-python", *HERDER)
    with Training(recipe, *saved, launcher=launcher) as training:
        training.wait_until(lambda: newest(training) >= EVERY_STEPS)
        training.rank(1).kill()
        _, err = training.finish()
        assert training.process.returncode == 0, err
        assert losses(training) == expected
        assert len(training.events("RunStarted")) == 2
