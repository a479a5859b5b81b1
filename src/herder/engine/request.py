"""What is asked of the engine and what it answers: sampling parameters, requests, events.

The ranges stand here once and the HTTP bodies reuse them. Nothing here knows HTTP, tokenizers or
how tokens are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from herder.config.record import Record
from herder.errors import RequestError, close_match

MAX_LOGPROBS = 20
"""Alternatives a token. Source: OpenAI API reference, top_logprobs."""

MaxTokens = Annotated[int, Field(ge=0)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
FinishReason = Literal["stop", "length", "abort", "error"]


def _in_a_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _with_ids_as_keys(value: Any) -> Any:
    """JSON writes token ids as strings where they are keys."""
    try:
        return {int(key): bias for key, bias in value.items()} if isinstance(value, dict) else value
    except ValueError:
        raise PydanticCustomError("token_id", "keys must be token ids") from None


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


class SamplingFields(Record):
    """How an answer is drawn and where it ends, as clients of every kind may ask for it."""

    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Ends of text, stop ids and stop strings are ignored for this many tokens."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """0, or less than sampler.GREEDY_TEMPERATURE: the likeliest token."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Smallest set of tokens whose probability reaches this; the best one always stays."""
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = 0
    """Only this many tokens; 0 or -1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Only tokens at least this likely, relative to the best one."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Of this request's own generator; None: from the operating system."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Both count the answer's tokens only."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Counts the prompt's tokens and the answer's. Logits over less would leave fp32's range."""
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_with_ids_as_keys)
    ] = Field(default_factory=dict)
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(max_length=16, strict=False),
        BeforeValidator(_in_a_tuple),
    ] = ()
    """One string or several."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(strict=False)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False


class SamplingParams(SamplingFields):
    """What the engine is told of them. A bad value raises RequestError with its field."""

    max_tokens: MaxTokens | None = None
    """Longest answer; None: what the window leaves; 0: the prompt is read and nothing is made."""
    logprobs: NumLogprobs | None = None
    """None: none; n: the chosen token's and those of the n likeliest."""
    prompt_logprobs: NumLogprobs | None = None

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


class TokenConstraint(Protocol):
    """Which tokens one answer may consist of, such as a grammar that it follows."""

    def allowed(self) -> bytes:
        """One bit a token for the next one, the first token in the lowest bit of the first byte."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on past a token that was allowed; whether it is the end, which has no text."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer. Without a decoder events carry no text and stop strings are refused."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    decoder: TextDecoder | None = None
    constraint: TokenConstraint | None = None
    """Its end is the answer's, whatever min_tokens says. Of this answer alone, as the decoder."""
    cache_salt: str | None = None
    """Only requests with the same one share what is cached of their prompts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model and its cache can take."""

    window_tokens: int
    vocab_size: int
    """Width of the head, padding rows included."""

    def longest_answer(self, request: Request) -> int:
        """Tokens after which an answer ends in any case."""
        longest = request.params.max_tokens
        return self.window_tokens - len(request.prompt_ids) if longest is None else longest


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
    params, window, num_prompt = request.params, limits.window_tokens, len(request.prompt_ids)
    check_ids(request.prompt_ids, limits, parameter="prompt")
    check_ids(params.stop_token_ids, limits, parameter="stop_token_ids")
    check_ids(params.logit_bias, limits, parameter="logit_bias")
    room, longest = window - num_prompt, limits.longest_answer(request)
    if not num_prompt:
        raise RequestError("prompt: has no tokens; give at least one", parameter="prompt")
    if params.stop and request.decoder is None:
        raise RequestError("stop: needs a decoder of text", parameter="stop")
    if room < 0 or (room == 0 and params.max_tokens != 0):
        raise RequestError(
            f"prompt: {num_prompt} tokens leave no room for an answer in the model's window "
            f"of {window} tokens. Shorten the prompt to {window - 1} or fewer.",
            parameter="prompt",
        )
    if longest > room:
        raise RequestError(
            f"max_tokens: the prompt's {num_prompt} tokens and max_tokens={longest} exceed the "
            f"model's window of {window} tokens. At most max_tokens={room} fits; leave it out to "
            "use all of that.",
            parameter="max_tokens",
        )
    if params.min_tokens > longest:
        raise RequestError(
            f"min_tokens: {params.min_tokens} exceeds the longest answer, {longest} tokens",
            parameter="min_tokens",
        )


def check_ids(token_ids: Iterable[int], limits: Limits, *, parameter: str) -> None:
    """Raise RequestError where an id is outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                f"{parameter}: token id {token_id} is outside the vocabulary, "
                f"0 to {limits.vocab_size - 1}",
                parameter=parameter,
            )
