"""The base of every record: frozen, strict, no unknown keys."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator, Tag


class Record(BaseModel):
    """A frozen pydantic model: wrong types and unknown keys are errors, never coerced or dropped.

    Validators are built when a record is first used: importing the records must cost next to
    nothing, since `herder plan` answers at once.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, defer_build=True, allow_inf_nan=False
    )


def _form(value: Any) -> str:
    return "<record>" if isinstance(value, (dict, BaseModel)) else "<word>"


WORD, RECORD, WORD_OR_RECORD = Tag("<word>"), Tag("<record>"), Discriminator(_form)
"""For fields that take a word or a mapping: an error then speaks of the form that was meant."""
