"""What is asked of the engine and what it answers: sampling parameters, requests, events.

The ranges stand here once and the HTTP bodies reuse them. Nothing here knows HTTP, tokenizers or
how tokens are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, ValidationError

from herder.config.record import Record
from herder.errors import RequestError, close_match

MAX_LOGPROBS = 20
"""Alternatives a token. Source: OpenAI API reference, top_logprobs."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256

MaxTokens = Annotated[int, Field(ge=0)]
MinTokens = Annotated[int, Field(ge=0)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]

FinishReason = Literal["stop", "length", "abort", "error"]


def refused(violations: Iterable[Mapping[str, Any]], fields: Iterable[str]) -> RequestError:
    """All violations pydantic found as one RequestError; `parameter` names the first one's field.

    `fields`: names that would be right. A rule between fields tells which one it is about by the
    type of its PydanticCustomError.
    """
    known = frozenset(fields)
    lines, parameter = [], None
    for violation in violations:
        path = [str(part) for part in violation["loc"]]
        kind = violation["type"]
        parameter = parameter or (path[0] if path else kind if kind in known else None)
        lines.append(_violation_line(violation, path, known))
    return RequestError("; ".join(dict.fromkeys(lines)), parameter=parameter)


def _violation_line(violation: Mapping[str, Any], path: list[str], known: frozenset[str]) -> str:
    place, kind, message = ".".join(path), violation["type"], violation["msg"]
    if kind == "extra_forbidden":
        hint = f" {close_match(path[-1], known)}" if len(path) == 1 else ""
        return f"{place}: unknown field.{hint}"
    if kind == "missing":
        return f"{place}: required, but absent"
    if not path:
        return f"{kind}: {message}" if kind in known else message
    given = repr(violation["input"])
    shown = given if len(given) <= 60 else f"{given[:57]}..."
    return f"{place}: {message[:1].lower()}{message[1:]}; {shown} was given"


class SamplingParams(Record):
    """How one answer is drawn and where it ends. A bad value raises RequestError with its field."""

    max_tokens: MaxTokens | None = None
    """Longest answer; None: what the window leaves; 0: the prompt is read and nothing is made."""
    min_tokens: MinTokens = 0
    """Ends of text, stop ids and stop strings are ignored for this many tokens."""
    temperature: Temperature = 1.0
    """0, or less than sampler.GREEDY_TEMPERATURE: the likeliest token."""
    top_p: TopP = 1.0
    """Smallest set of tokens whose probability reaches this; the best one always stays."""
    top_k: TopK = 0
    """Only this many tokens; 0 or -1: all."""
    min_p: MinP = 0.0
    """Only tokens at least this likely, relative to the best one."""
    seed: Seed | None = None
    """Of this request's own generator; None: from the operating system."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    """Both count the answer's tokens only."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Counts the prompt's tokens and the answer's."""
    logit_bias: tuple[tuple[TokenId, Bias], ...] = ()
    logprobs: NumLogprobs | None = None
    """None: none; n: the chosen token's and those of the n likeliest."""
    prompt_logprobs: NumLogprobs | None = None
    stop: Annotated[tuple[StopString, ...], Field(max_length=MAX_STOP_STRINGS)] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise refused(error.errors(include_url=False), type(self).model_fields) from None


class TextDecoder(Protocol):
    """Turns the ids of one answer into text as they come, never half a character."""

    def add(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer. Without a decoder events carry no text and stop strings are refused."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    decoder: TextDecoder | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model and its cache can take."""

    window_tokens: int
    vocab_size: int
    """Width of the head, padding rows included."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """ln p of one token, before penalties, bias, temperature and filters."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's log-probability and those of the likeliest ones, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The prompt's log-probabilities, one a token; None for the first, which follows nothing."""

    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class TokenMade:
    """One more token. `text` is what may be shown now, not always this token's own text."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every accepted request, exactly once."""

    reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    text: str = ""
    """Text held back until now."""
    stopped_by: str | int | None = None
    """The stop string, stop id or end of text that ended it."""
    error: Exception | None = None


Event = PromptScored | TokenMade | Finished


def check_request(request: Request, limits: Limits) -> None:
    """Raise RequestError where the request does not fit the model; nothing is adjusted."""
    prompt_ids, params = request.prompt_ids, request.params
    if not prompt_ids:
        raise RequestError("prompt: has no tokens; give at least one", parameter="prompt")
    check_ids(prompt_ids, limits, parameter="prompt")
    check_ids(params.stop_token_ids, limits, parameter="stop_token_ids")
    biased = [token_id for token_id, _ in params.logit_bias]
    check_ids(biased, limits, parameter="logit_bias")
    if params.stop and request.decoder is None:
        raise RequestError("stop: needs a decoder of text", parameter="stop")
    _check_lengths(len(prompt_ids), params, limits.window_tokens)


def check_ids(token_ids: Sequence[int], limits: Limits, *, parameter: str) -> None:
    """Raise RequestError where an id is outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                f"{parameter}: token id {token_id} is outside the vocabulary, "
                f"0 to {limits.vocab_size - 1}",
                parameter=parameter,
            )


def _check_lengths(num_prompt_tokens: int, params: SamplingParams, window_tokens: int) -> None:
    room_tokens = window_tokens - num_prompt_tokens
    if room_tokens < 0 or (room_tokens == 0 and params.max_tokens != 0):
        raise RequestError(
            f"prompt: {num_prompt_tokens} tokens leave no room for an answer in the model's window "
            f"of {window_tokens} tokens. Shorten the prompt to {window_tokens - 1} or fewer.",
            parameter="prompt",
        )
    if params.max_tokens is not None and params.max_tokens > room_tokens:
        raise RequestError(
            f"max_tokens: the prompt's {num_prompt_tokens} tokens and max_tokens="
            f"{params.max_tokens} exceed the model's window of {window_tokens} tokens. "
            f"At most max_tokens={room_tokens} fits; leave it out to use all of that.",
            parameter="max_tokens",
        )
    longest = room_tokens if params.max_tokens is None else params.max_tokens
    if params.min_tokens > longest:
        raise RequestError(
            f"min_tokens: {params.min_tokens} exceeds the longest answer, {longest} tokens",
            parameter="min_tokens",
        )
