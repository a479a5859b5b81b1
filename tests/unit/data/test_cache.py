"""What enters the cache enters whole, once, and leaves nothing when it fails."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from herder.data.cache import build_once, cache_folder
from herder.errors import ResourceError


def test_the_environment_moves_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HERDER_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("HERDER_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "herder"


def test_two_that_want_the_same_build_it_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(fresh: Path) -> None:
        time.sleep(0.05)
        (fresh / "done").touch()
        built.append(fresh)

    target = tmp_path / "thing"
    threads = [threading.Thread(target=build_once, args=(target, build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (target / "done").exists()


def test_a_failed_build_leaves_nothing_and_the_next_one_may_succeed(tmp_path: Path) -> None:
    def fail(fresh: Path) -> None:
        (fresh / "half").touch()
        raise ValueError("stopped")

    target = tmp_path / "thing"
    with pytest.raises(ValueError, match="stopped"):
        build_once(target, fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    build_once(target, lambda fresh: (fresh / "done").touch())
    assert (target / "done").exists()


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".thing.partial").mkdir()
    (tmp_path / ".thing.partial" / "half").touch()
    (tmp_path / ".other.partial").mkdir()
    build_once(tmp_path / "thing", lambda fresh: (fresh / "done").touch())
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {"thing", ".other.partial"}
    assert [path.name for path in (tmp_path / "thing").iterdir()] == ["done"]


def test_a_cache_that_cannot_be_written_says_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="HERDER_CACHE"):
        build_once(tmp_path / "file" / "thing", Path.touch)


def test_a_full_disk_says_what_would_do(tmp_path: Path) -> None:
    def fill(fresh: Path) -> None:
        raise OSError(28, "No space left on device", str(fresh))

    with pytest.raises(ResourceError, match=r"No space left on device\. Free some space"):
        build_once(tmp_path / "thing", fill)
