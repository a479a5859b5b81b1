from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from herder.checkpoint.hub import fetch
from herder.checkpoint.source import resolve_model
from herder.errors import ModelError
from herder.families.registry import families


def test_a_model_that_is_neither_reachable_nor_cached_is_told() -> None:
    with pytest.raises(ModelError, match="no hub could be reached and it is not in the cache"):
        fetch("nobody/nothing", needs_weights=False)


def test_a_cached_model_is_used_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    config = families()["llama"].tiny_config()
    (snapshot / "config.json").write_text(str(config).replace("'", '"'))
    source = resolve_model("somebody/tiny", needs_weights=False)
    assert (source.name, source.folder) == ("tiny", snapshot)


def test_a_name_that_is_no_repository_is_told() -> None:
    with pytest.raises(ModelError, match="hub model"):
        resolve_model("-bad-/..name..")
