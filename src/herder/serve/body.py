"""What every body of the API is made of: the base record, JSON values, fields that are refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from herder.config.record import Record


def unless(neutral: Any = None) -> BeforeValidator:
    """Refuse every value of a known field, apart from the one that asks for nothing."""

    def refuse(value: Any) -> Any:
        if type(value) is not type(neutral) or value != neutral:
            raise PydanticCustomError(
                "unsupported", "this field is not supported yet; leave it out"
            )
        return value

    return BeforeValidator(refuse)


def _is_finite(value: JsonValue) -> JsonValue:
    """Python's reader lets NaN and Infinity pass, which are no JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite", "holds a number that is not finite") from None
    return value


Json: TypeAlias = Annotated[JsonValue, AfterValidator(_is_finite)]
Nothing: TypeAlias = Annotated[Any, unless()]
NoItems: TypeAlias = Annotated[Any, unless([])]


class Body(Record):
    """What a client sends; null is the same as absent.

    Its validator is built at once: FastAPI takes it when a route is declared.
    """

    model_config = ConfigDict(defer_build=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cls.model_fields
        return {
            name: each for name, each in value.items() if each is not None or name not in fields
        }
