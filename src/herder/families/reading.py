"""Strict reading of a config.json: every key is consumed, listed as ignorable, or refused.

Owns how keys, types and nulls are told apart and how problems are collected into one message.
Which keys a family has, and what an absent one means, is the family's knowledge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from herder.errors import ConfigError, close_match

REQUIRED: Any = object()
"""As a default: the key must be there."""

_IDENTITY = (
    "_name_or_path architectures auto_map dtype model_type torch_dtype transformers_version "
    "_attn_implementation _attn_implementation_autoset attn_implementation tokenizer_class "
    "finetuning_task id2label label2id problem_type prefix task_specific_params model_max_length "
    "transformers.js_config unsloth_version unsloth_fixed"
)
_TOKENS = (
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id "
    "forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens begin_suppress_tokens"
)
_GENERATION = (
    "do_sample temperature top_k top_p typical_p min_length max_length max_new_tokens num_beams "
    "num_beam_groups num_return_sequences diversity_penalty length_penalty repetition_penalty "
    "encoder_no_repeat_ngram_size no_repeat_ngram_size early_stopping remove_invalid_values "
    "exponential_decay_length_penalty output_scores return_dict_in_generate"
)
_SWITCHES = (
    "use_cache output_attentions output_hidden_states return_dict torchscript tf_legacy_loss "
    "use_bfloat16 chunk_size_feed_forward"
)
IGNORABLE = frozenset(" ".join((_IDENTITY, _TOKENS, _GENERATION, _SWITCHES)).split())
"""Keys that no computation here reads: identity, storage, generation defaults and old switches.

Token ids and sampling defaults go to the model source, not to the architecture. auto_map names
code that would replace the published class; the class is built here and that code never runs.
"""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_dropout": (0, 0.0, None),
    "hidden_dropout": (0, 0.0, None),
    "resid_pdrop": (0, 0.0, None),
    "embd_pdrop": (0, 0.0, None),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
}
"""Keys that would change the computation, with the values at which they do not."""

QUANTIZATION = "quantization_config"
"""How weights are stored and not what is computed of them: read where they are loaded."""


class ConfigReader:
    """Takes keys out of a config.json one by one and remembers what is wrong.

    Takers return a harmless placeholder where a key is wrong, so that all problems are found;
    `finish` must be called before anything is made of the values, and raises them together.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        where: str,
        path: str = "",
        problems: list[str] | None = None,
    ) -> None:
        self._config = config
        self._where = where
        self._path = path
        self._known: set[str] = set()
        self._sections: dict[str, ConfigReader] = {}
        self.problems: list[str] = [] if problems is None else problems

    def value(self, key: str, default: Any = None) -> Any:
        """Whatever stands under a key."""
        self._known.add(key)
        return self._config.get(key, default)

    def integer(self, key: str, default: int = REQUIRED, *, minimum: int = 1) -> int:
        """An int of at least `minimum`; null is refused."""
        value = self.value(key, default)
        if type(value) is int and value >= minimum:
            return value
        self._wrong(key, value, f"a whole number of at least {minimum}")
        return minimum

    def optional_integer(
        self, key: str, default: int | None = None, *, minimum: int = 1
    ) -> int | None:
        """An int of at least `minimum`, or null; `default` is what an absent key means."""
        value = self.value(key, default)
        return None if value is None else self.integer(key, value, minimum=minimum)

    def optional_integers(self, key: str) -> list[int] | None:
        """A list of ints of at least 0, or null or absent: None."""
        value = self.value(key)
        if value is None or (isinstance(value, list) and all(_is_count(each) for each in value)):
            return value
        self._wrong(key, value, "a list of whole numbers of at least 0")
        return None

    def number(self, key: str, default: float = REQUIRED, *, may_be_zero: bool = False) -> float:
        """An int or float above 0, or 0 where that has a meaning; null is refused."""
        value = self.value(key, default)
        if type(value) in (int, float) and (value > 0 or (may_be_zero and value == 0)):
            return float(value)
        self._wrong(key, value, "a number of at least 0" if may_be_zero else "a number above 0")
        return 1.0

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """An int or float above 0, or null; `default` is what an absent key means."""
        value = self.value(key, default)
        return None if value is None else self.number(key, value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers above 0."""
        value = self.value(key, REQUIRED)
        if isinstance(value, list) and all(type(v) in (int, float) and v > 0 for v in value):
            return tuple(float(v) for v in value)
        self._wrong(key, value, "a list of numbers above 0")
        return ()

    def boolean(self, key: str, default: bool) -> bool:
        """True or false; null is refused."""
        value = self.value(key, default)
        if not isinstance(value, bool):
            self._wrong(key, value, "true or false")
            return False
        return value

    def truth(self, key: str, default: bool) -> bool:
        """True or false, or a number that stands for one of them (Llama 4 Scout's is a 4)."""
        value = self.value(key, default)
        return value != 0 if _is_count(value) else self.boolean(key, default)

    def choice(self, key: str, known: Mapping[str, Any], default: str = REQUIRED) -> Any:
        """What `known` says for the text under a key."""
        value = self.value(key, default)
        if isinstance(value, str) and value in known:
            return known[value]
        hint = close_match(value, known) if isinstance(value, str) else ""
        self._wrong(key, value, f"one of {', '.join(sorted(known))}", hint)
        return next(iter(known.values()))

    def optional_text(self, key: str) -> str | None:
        """A string, or null or absent: None."""
        value = self.value(key)
        if value is None or isinstance(value, str):
            return value
        self._wrong(key, value, "a string")
        return None

    def optional_texts(self, key: str) -> list[str] | None:
        """A list of strings, or null or absent: None."""
        value = self.value(key)
        if value is None or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            return value
        self._wrong(key, value, "a list of strings")
        return None

    def optional_section(self, key: str) -> ConfigReader | None:
        """A nested object to be read as strictly, or None where it is null, absent or empty.

        The same reader each time: several may take their keys from one section.
        """
        if key in self._sections:
            return self._sections[key]
        value = self.value(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            self._wrong(key, value, "an object")
            return None
        path = f"{self._path}{key}."
        section = ConfigReader(value, where=self._where, path=path, problems=self.problems)
        self._sections[key] = section
        return section

    def sections(self, key: str) -> list[ConfigReader]:
        """The objects of a nested object of objects, whatever they are called there."""
        section = self.optional_section(key)
        if section is None:
            return []
        each = [section.optional_section(name) for name in section._config]
        return [found for found in each if found is not None]

    def has(self, key: str) -> bool:
        """Whether a key is there and not null; does not consume it."""
        return self._config.get(key) is not None

    def ignore(self, *keys: str) -> None:
        """Names keys that this family may hold and no computation reads."""
        self._known.update(keys)

    def neutral(self, key: str, *values: Any) -> None:
        """Accepts a key only at values with which it changes nothing."""
        self._known.add(key)
        if key in self._config and self._config[key] not in values:
            told = " or ".join(_json(value) for value in values)
            self._wrong(key, self._config[key], f"{told}: nothing else is supported")

    def problem(self, text: str) -> None:
        """Adds a mistake that spans several keys."""
        self.problems.append(text)

    def finish(self) -> None:
        """Raises ConfigError with every problem, unread keys included."""
        for key, values in NEUTRAL.items():
            self.neutral(key, *values)
        self._refuse_unread(IGNORABLE)
        if self.problems:
            listed = "\n  ".join(dict.fromkeys(self.problems))
            raise ConfigError(f"{self._where}: config.json cannot be read.\n  {listed}")

    def _refuse_unread(self, ignorable: frozenset[str]) -> None:
        for key in self._config:
            if key not in self._known and key not in ignorable and key != QUANTIZATION:
                self.problems.append(
                    f"{self._path}{key}={_json(self._config[key])}: no such key is known here, so "
                    f"it might change the computation. {close_match(key, self._known)}"
                )
        for section in self._sections.values():
            section._refuse_unread(frozenset())

    def _wrong(self, key: str, value: Any, wanted: str, hint: str = "") -> None:
        given = "is missing" if value is REQUIRED else f"is {_json(value)}"
        self.problems.append(f"{self._path}{key} {given}; it must be {wanted}. {hint}".rstrip())


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _json(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."
