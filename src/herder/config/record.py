"""The base of every record: frozen, strict, no unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen pydantic model: wrong types and unknown keys are errors, never coerced or dropped.

    Validators are built when a record is first used: importing the records must cost next to
    nothing, since `herder plan` answers at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)
