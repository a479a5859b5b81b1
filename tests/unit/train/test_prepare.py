"""Before anything heavy: one rank or a refusal, planned values filled in, all of it shown."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from herder.checkpoint.directory import checkpoint_path
from herder.checkpoint.metadata import ExperimentMeta, config_hash, write_meta
from herder.checkpoint.source import resolve_model
from herder.config.load import load_run_config
from herder.config.run import RunConfig
from herder.errors import CheckpointError, ConfigError
from herder.train.prepare import CONFIG, describe_end, describe_plan, plan_run, saved_config

SOURCE = resolve_model("smollm2-135m")


def config(run_directory: Path | str = "runs/none", **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_directory": str(run_directory),
            "model": {"source": "smollm2-135m", "initialize": "random"},
            "train": {"sequence_length": 128, **train},
        }
    )


def test_values_that_a_recipe_leaves_out_are_planned() -> None:
    filled, plan = plan_run(config(), SOURCE)
    assert filled.train.micro_batch_size == plan.micro_batch_size > 0
    assert filled.train.global_batch_tokens == plan.global_batch_tokens
    assert plan.layout.num_ranks == 1


def test_what_a_recipe_says_stays_said() -> None:
    filled, _ = plan_run(config(micro_batch_size=3, global_batch_tokens=768), SOURCE)
    assert (filled.train.micro_batch_size, filled.train.global_batch_tokens) == (3, 768)


def test_a_batch_that_is_no_whole_number_of_micro_batches_is_rounded_and_told() -> None:
    filled, plan = plan_run(config(micro_batch_size=3, global_batch_tokens=800), SOURCE)
    assert filled.train.global_batch_tokens == plan.global_batch_tokens != 800
    assert "global_batch_tokens 800 ->" in describe_plan(filled, plan)


def test_a_run_that_goes_on_keeps_the_values_it_was_planned_with(tmp_path: Path) -> None:
    started = config(tmp_path, micro_batch_size=7, global_batch_tokens=7 * 128)
    settings = started.model_dump(mode="json")
    meta = ExperimentMeta(
        model="m",
        family="llama",
        architecture={},
        config=settings,
        config_hash=config_hash(settings),
        plan={},
        git_commit=None,
        versions={},
        step=1,
        unix_seconds=0.0,
    )
    write_meta(meta, tmp_path)
    fresh, _ = plan_run(config(tmp_path), SOURCE)
    assert fresh.train.micro_batch_size != 7
    checkpoint_path(tmp_path, 1).mkdir(parents=True)
    again, _ = plan_run(config(tmp_path), SOURCE)
    assert (again.train.micro_batch_size, again.train.global_batch_tokens) == (7, 896)


def test_a_run_is_read_from_the_folder_where_it_lies_now(tmp_path: Path) -> None:
    text = yaml.safe_dump(config("runs/before", seed=3).model_dump(mode="json"))
    (tmp_path / CONFIG).write_text(text)
    found = saved_config(tmp_path, ["train.steps=7"])
    assert found == config(tmp_path, seed=3, steps=7)
    with pytest.raises(ConfigError, match=r"herder train .*config\.yaml --set run_directory="):
        saved_config(tmp_path, ["run_directory=runs/another"])


def test_a_folder_without_a_config_is_no_run_to_go_on_with(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no config\.yaml, so this is no run"):
        saved_config(tmp_path, [])


def test_a_saved_key_that_is_gone_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("model: {source: smollm2-135m}\ntrain:\n  stepz: 3\n")
    with pytest.raises(ConfigError, match=r"config\.yaml:3: train\.stepz: unknown key"):
        saved_config(tmp_path, [])


def test_a_run_without_a_cluster_is_planned_for_the_ranks_that_were_started() -> None:
    alone, started = plan_run(config(), SOURCE)[1], plan_run(config(), SOURCE, num_ranks=3)[1]
    assert alone.layout.num_ranks == 1
    assert started.layout.num_ranks == 3
    assert started.global_batch_tokens == 3 * started.micro_batch_tokens


def test_a_schedule_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"exceeds train\.steps=5"):
        plan_run(config(steps=5, schedule={"kind": "cosine", "warmup_steps": 6}), SOURCE)


def test_the_end_names_the_next_commands_or_how_to_go_on() -> None:
    assert "herder evaluate runs/none" in describe_end(config(), 100, None)
    assert "Go on with:\n  herder train r.yaml" in describe_end(config(), 3, "herder train r.yaml")
    assert "\n  herder serve 'runs/my run'" in describe_end(config("runs/my run"), 100, None)


def test_planning_a_run_imports_no_torch() -> None:
    program = "import sys, herder.train.prepare\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["debug", "demo", "phase1_single"])
def test_a_shipped_recipe_loads_and_fits_its_schedule(repository: Path, name: str) -> None:
    recipe = load_run_config(repository / "recipes" / f"{name}.yaml")
    filled, plan = plan_run(recipe.model_copy(update={"run_directory": "runs/none"}), SOURCE)
    assert filled.train.micro_batch_size == recipe.train.micro_batch_size
    assert plan.adjustments == ()
