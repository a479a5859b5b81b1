"""experiment_meta.json: told apart by a hash, and differences named key by key."""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from herder.checkpoint.metadata import (
    META,
    ExperimentMeta,
    config_hash,
    differing_keys,
    read_meta,
    refuse_other_config,
    source_commit,
    write_meta,
)
from herder.config.run import RunConfig
from herder.errors import CheckpointError
from tests.tiny import tiny_model

CONFIG: dict[str, Any] = {
    "run_directory": "runs/a",
    "model": {"source": "tiny", "override": {}},
    "train": {"steps": 10, "seed": 0, "optimizer": {"learning_rate": 1e-3}},
    "checkpoint": {"every_steps": 5},
}


WHOLE = RunConfig.model_validate(CONFIG).model_dump(mode="json")


def changed(path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    *parents, name = path.split(".")
    inner = config
    for parent in parents:
        inner = inner[parent]
    inner[name] = value
    return config


def meta() -> ExperimentMeta:
    return ExperimentMeta(
        model="tiny",
        family="llama",
        architecture={"hidden_size": 64},
        config=CONFIG,
        config_hash=config_hash(CONFIG),
        plan={},
        git_commit=None,
        versions={"torch": "2.13.0"},
        step=3,
        unix_seconds=1.0,
    )


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    write_meta(meta(), tmp_path)
    back = read_meta(tmp_path)
    assert back.model_copy(update={"config": CONFIG}) == meta()
    assert differing_keys(CONFIG, back.config) == {
        path: (None, value) for path, (_, value) in differing_keys(CONFIG, WHOLE).items()
    }, "only defaults were added"
    assert [path.name for path in tmp_path.iterdir()] == [META]


def test_the_hash_does_not_depend_on_the_order_of_keys() -> None:
    assert config_hash(dict(reversed(CONFIG.items()))) == config_hash(CONFIG)


def test_a_key_that_is_left_out_counts_as_its_default() -> None:
    assert config_hash(CONFIG) == config_hash(WHOLE)
    assert config_hash(changed("train.seed", 1)) != config_hash(CONFIG)


def test_keys_that_are_younger_than_this_herder_are_passed_over(tmp_path: Path) -> None:
    fields = meta().model_dump(mode="json") | {"weather": "fine"}
    (tmp_path / META).write_text(json.dumps(fields))
    assert read_meta(tmp_path).step == 3


def test_an_architecture_gets_the_fields_that_are_younger_than_it(tmp_path: Path) -> None:
    whole = tiny_model("dm").model_dump(mode="json")
    older = copy.deepcopy(whole)
    del older["moe"]["capacity_factor"], older["branch_norm"], older["layers"][0]["temperature"]
    write_meta(meta().model_copy(update={"architecture": older}), tmp_path)
    assert read_meta(tmp_path).architecture == whole


def test_a_config_with_a_key_that_is_gone_is_refused_with_the_herder_that_has_it() -> None:
    older = copy.deepcopy(CONFIG)
    older["train"]["momentum"] = 0.9
    saved = meta().model_copy(update={"config": older, "git_commit": "abc"})
    with pytest.raises(CheckpointError) as caught:
        refuse_other_config(saved, CONFIG, where=Path("runs/a"))
    assert "train.momentum: 0.9 there, None now" in str(caught.value)
    assert "go on with the one at commit abc" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [("train.steps", 20), ("checkpoint.every_steps", 1), ("run_directory", "runs/moved")],
)
def test_what_may_change_leaves_the_hash_alone(path: str, value: Any) -> None:
    assert config_hash(changed(path, value)) == config_hash(CONFIG)
    refuse_other_config(meta(), changed(path, value), where=Path("runs/a"))


def test_what_may_not_change_is_refused_with_both_values() -> None:
    other = changed("train.optimizer.learning_rate", 2e-3)
    other["train"]["steps"] = 99
    with pytest.raises(CheckpointError) as caught:
        refuse_other_config(meta(), other, where=Path("runs/a"))
    assert "train.optimizer.learning_rate: 0.001 there, 0.002 now" in str(caught.value)
    assert "train.steps: 10" not in str(caught.value)


def test_an_absent_key_differs_from_a_present_one() -> None:
    assert differing_keys({"a": {"b": 1}}, {"a": {}, "c": 2}) == {
        "a": (None, {}),
        "a.b": (1, None),
        "c": (None, 2),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ('{"format_version": 99}', "format_version=99"), ("[]", "=None")],
)
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / META).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_meta(tmp_path)


def test_a_folder_without_one_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run or checkpoint"):
        read_meta(tmp_path)


def test_the_commit_is_that_of_the_source_tree(repository: Path) -> None:
    head = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    if head.returncode:
        assert source_commit() is None
    else:
        assert (source_commit() or "").partition("+changes.")[0] == head.stdout.strip()
