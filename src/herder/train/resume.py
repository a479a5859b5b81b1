"""Where a run goes on: from the newest whole checkpoint of its directory, or from the start.

Owns what a resumed run is refused for and what it says aloud. On several ranks all of them call
these together and come to the same. Knows no step and no schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import chain
from pathlib import Path

from herder.checkpoint.changes import explain_changes
from herder.checkpoint.directory import (
    newest_checkpoint,
    remove_unfinished,
    set_aside,
    tainted_or_not,
)
from herder.checkpoint.manifest import find_damage, refuse_damaged
from herder.checkpoint.metadata import META, read_meta, refuse_other_config
from herder.checkpoint.run import Progress, load_checkpoint
from herder.config.run import RunConfig
from herder.errors import CheckpointError
from herder.observe.events import Bus, CheckpointLoaded, Incident, Notice
from herder.observe.meters import Stopwatch
from herder.parallel.turns import all_ranks_say, first_rank_decides, place_among_ranks
from herder.train.state import TrainRun, state_tensors


def find_checkpoint(run_directory: Path, config: RunConfig, bus: Bus) -> Path | None:
    """The checkpoint to go on from, or None for a new run. Hold the directory's lock.

    Contents are read and compared, by each rank some of the files. A damaged one is an incident,
    set aside, and the one before is used; a tainted one is an incident, and stays where it is.
    Raises CheckpointError when none can be used or the run was made with another config.
    """
    passed_over = dict[Path, str]()

    def clean() -> list[tuple[Path, str | None]]:
        remove_unfinished(run_directory)
        return tainted_or_not(run_directory)

    candidates = first_rank_decides(clean)
    found = newest_checkpoint(
        run_directory,
        verify=_verify_together,
        on_passed_over=passed_over.__setitem__,
        candidates=candidates,
    )
    if found is not None:
        tainted = {path for path, reason in candidates if reason is not None}
        first_rank_decides(lambda: _tell(found, config, passed_over, tainted, bus))
    elif (run_directory / META).is_file():
        told = f"{run_directory} was started before and has no checkpoint: from the start again"
        bus.emit(Notice(message=told))
    return found


def _verify_together(checkpoint: Path) -> None:
    problems = find_damage(checkpoint, reads_contents=True, share=place_among_ranks())
    refuse_damaged(checkpoint, chain.from_iterable(all_ranks_say(problems)))


def _tell(
    found: Path,
    config: RunConfig,
    passed_over: Mapping[Path, str],
    tainted: Set[Path],
    bus: Bus,
) -> None:
    """Refuse another config, and set aside what is damaged."""
    saved = read_meta(found)
    refuse_other_config(saved, config.model_dump(mode="json"), where=found.parents[1])
    for path, problem in passed_over.items():
        if path in tainted:
            kind, told = "tainted_checkpoint", f"{problem}. Passed over"
        else:
            kind, told = "damaged_checkpoint", f"{problem} Kept as {set_aside(path).name}"
        bus.emit(Incident(kind=kind, message=f"{told}; going on from {found.name}."))


def load_progress(run: TrainRun, checkpoint: Path, bus: Bus) -> Progress:
    """Copy a checkpoint into the run's tensors, and say how far it is and what is other than then.

    Raises CheckpointError when it does not fit the model or was trained on other documents.
    """
    watch = Stopwatch()
    tensors = state_tensors(run.decoder, run.optimizer)
    progress = load_checkpoint(checkpoint, tensors, architecture=run.meta.architecture)
    if progress.data.corpus not in (run.corpus, *run.earlier_corpora):
        raise CheckpointError(
            f"{checkpoint} was trained on other documents than {run.config.data.source} holds now: "
            f"their fingerprint was {progress.data.corpus[:12]}, it is {run.corpus[:12]}. Restore "
            "the source or the tokenizer, or --set run_directory=runs/another."
        )
    for told in first_rank_decides(lambda: explain_changes(read_meta(checkpoint), run.meta)):
        bus.emit(Notice(message=f"changed since step {progress.step}: {told}"))
    bus.emit(CheckpointLoaded(step=progress.step, path=str(checkpoint), seconds=watch.seconds()))
    return progress
