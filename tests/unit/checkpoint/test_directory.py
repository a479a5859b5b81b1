"""A run directory: the newest good checkpoint is found, never pointed at."""

import subprocess
import sys
from pathlib import Path

import pytest

from herder.checkpoint.directory import (
    checkpoint_path,
    list_checkpoints,
    locked,
    newest_checkpoint,
    remove_checkpoint,
    remove_unfinished,
    set_aside,
    step_of,
    writing,
)
from herder.checkpoint.inventory import keep_by
from herder.checkpoint.manifest import write_manifest
from herder.config.run import CheckpointConfig
from herder.errors import CheckpointError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (9, 10, 100_000_000):
        folder = checkpoint_path(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "state").write_bytes(bytes(step % 251))
        write_manifest(folder)
    return tmp_path


def test_checkpoints_are_listed_by_step_and_not_by_name(run: Path) -> None:
    assert [step_of(path) for path in list_checkpoints(run)] == [9, 10, 100_000_000]
    assert newest_checkpoint(run) == checkpoint_path(run, 100_000_000)


def test_a_directory_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "absent") is None


def test_a_damaged_newest_is_told_and_the_one_before_is_used(run: Path) -> None:
    (checkpoint_path(run, 100_000_000) / "state").write_bytes(b"short")
    (checkpoint_path(run, 10) / "manifest.json").unlink()
    told = list[int]()
    found = newest_checkpoint(run, on_passed_over=lambda path, _: told.append(step_of(path)))
    assert found == checkpoint_path(run, 9)
    assert told == [100_000_000, 10]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(run: Path) -> None:
    for path in list_checkpoints(run):
        (path / "state").unlink()
    with pytest.raises(CheckpointError, match="all 3 are damaged") as caught:
        newest_checkpoint(run)
    assert str(caught.value).count("state is missing") == 3


def test_a_checkpoint_set_aside_is_kept_but_no_longer_found(run: Path) -> None:
    aside = set_aside(checkpoint_path(run, 100_000_000))
    assert (aside / "state").exists()
    assert newest_checkpoint(run) == checkpoint_path(run, 10)


def test_only_the_newest_are_kept(run: Path) -> None:
    keep_by(run, CheckpointConfig(keep_last=2))
    assert [step_of(path) for path in list_checkpoints(run)] == [10, 100_000_000]
    assert len(list((run / "checkpoints").iterdir())) == 2


def test_an_old_checkpoint_that_cannot_be_deleted_is_told_and_newer_ones_stay(run: Path) -> None:
    oldest = list_checkpoints(run)[0]
    occupied = oldest.with_name(f".deleting-{oldest.name}")
    occupied.write_text("a file where the doomed folder would go")
    with pytest.raises(CheckpointError, match="step-00000009 cannot be deleted"):
        keep_by(run, CheckpointConfig(keep_last=2))
    assert len(list_checkpoints(run)) == 3


def test_what_a_killed_process_left_is_removed_and_nothing_else(run: Path) -> None:
    half = run / "checkpoints" / ".writing-step-00000011"
    half.mkdir()
    (half / "state").write_bytes(b"half")
    assert len(list_checkpoints(run)) == 3
    remove_unfinished(run)
    assert not half.exists()
    assert len(list_checkpoints(run)) == 3


def test_what_is_written_gets_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "x"
    with pytest.raises(CheckpointError, match="No such file"), writing(target, num_bytes=1) as half:
        (half / "absent" / "state").write_bytes(b"half")
    assert list((tmp_path / "runs").iterdir()) == []
    with writing(target, num_bytes=1) as fresh:
        (fresh / "state").write_bytes(b"whole")
        assert not target.exists()
    assert (target / "state").read_bytes() == b"whole"


def test_two_processes_cannot_train_in_one_directory(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from herder.checkpoint.directory import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError, match=f"id {child.pid}"), locked(tmp_path):
        pass
    child.kill()
    child.communicate()
    with locked(tmp_path):
        pass


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be used.*exists"), locked(tmp_path / "file"):
        pass


def test_a_file_that_cannot_be_written_while_it_is_held_is_told_and_lets_go(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    told = pytest.raises(CheckpointError, match=r"cannot be used.*Is a directory.*events\.jsonl")
    with told, locked(tmp_path):
        (tmp_path / "events.jsonl").open("a")
    with pytest.raises(FileNotFoundError, match="elsewhere"), locked(tmp_path):
        Path("/elsewhere/file").read_text()


def test_a_checkpoint_that_cannot_be_deleted_is_told_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    checkpoint_path(tmp_path, 1).parent.mkdir()
    checkpoint_path(tmp_path, 1).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"cannot be deleted \(.*symbolic link"):
        remove_checkpoint(checkpoint_path(tmp_path, 1))
    assert (tmp_path / "elsewhere").is_dir()


def test_finding_a_checkpoint_imports_no_torch() -> None:
    program = (
        "import sys; import herder.checkpoint.directory, herder.checkpoint.metadata\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
