"""What was thought of a run when a checkpoint was written, kept inside it: is it any good?

In train_state.json, which the manifest covers. Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from herder.config.record import Record

TRAIN_STATE = "train_state.json"


class Verdict(Record):
    """How good the weights of a checkpoint are, as far as that was known."""

    tainted: str | None = None
    """Why the run was judged broken at that moment. Such a checkpoint is only used by name."""
    held_out_loss: float | None = None
    """Of these very weights, in nats; None where that step was not evaluated."""


UNJUDGED = Verdict()


def read_verdict(checkpoint: Path) -> Verdict:
    """The verdict of a checkpoint; an empty one where none is there that can be read."""
    try:
        state = json.loads((checkpoint / TRAIN_STATE).read_bytes())
        return Verdict.model_validate(state["verdict"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return UNJUDGED
