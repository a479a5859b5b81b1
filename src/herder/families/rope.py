"""The rope keys of a config.json, in all their spellings, as a RopeConfig and back.

Owns where theta and scaling may stand and what each kind's missing fields mean. Formulas of the
frequencies are the model's; only attention factors are computed here, for they come from several
keys that nothing else needs.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from herder.config.architecture import (
    DefaultScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from herder.families.reading import ConfigReader

_KINDS = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
    "su": "longrope",
}
THETA = 10_000.0
"""What an absent rope_theta means for every family here. Source: transformers, default_theta."""


def read_rope(reader: ConfigReader, *, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """The one rotary table of a dense decoder.

    Reads `rope_theta`, `rope_scaling` (`type` or `rope_type`), and `rope_parameters`, whose theta
    wins over the top-level one. Both mappings may stand side by side if they say the same: versions
    of transformers differ in which they would take.
    """
    theta = reader.number("rope_theta", THETA)
    window = reader.optional_integer("original_max_position_embeddings")
    sections = [reader.optional_section(key) for key in ("rope_parameters", "rope_scaling")]
    partial = reader.optional_number("partial_rotary_factor")
    ropes = [
        _read_section(
            section,
            theta=theta,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            window=window,
            partial=partial,
        )
        for section in sections
        if section is not None
    ]
    if len(ropes) == 2 and ropes[0] != ropes[1] and not reader.problems:
        reader.problem(
            "rope_parameters and rope_scaling describe different rotations; keep only the right one"
        )
    return ropes[0] if ropes else _build(reader, theta, head_dim, DefaultScaling())


def _read_section(
    section: ConfigReader,
    *,
    theta: float,
    head_dim: int,
    max_position_embeddings: int,
    window: int | None,
    partial: float | None,
) -> RopeConfig:
    kind_key = "rope_type" if section.has("rope_type") or not section.has("type") else "type"
    section.ignore("type", "rope_type")
    kind = section.choice(kind_key, _KINDS, "default")
    theta = section.number("rope_theta", theta)
    partial = section.optional_number("partial_rotary_factor") or partial
    if kind != "default" and partial not in (None, 1.0):
        section.problem(
            f"partial_rotary_factor={partial} with rope {kind!r}: these families rotate whole heads"
        )
    scaling = _SCALINGS[kind](section, max_position_embeddings, window)
    return _build(section, theta, head_dim, scaling)


def _build(reader: ConfigReader, theta: float, rotary_dim: int, scaling: RopeScaling) -> RopeConfig:
    try:
        return RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=scaling)
    except ValidationError as error:
        if not reader.problems:
            for each in error.errors():
                reader.problem(f"rope: {each['msg'].removeprefix('Value error, ')}")
        return RopeConfig(theta=theta, rotary_dim=2)


def _default(section: ConfigReader, _: int, __: int | None) -> DefaultScaling:
    section.ignore("original_max_position_embeddings")
    section.neutral("factor", 1, None)
    return DefaultScaling()


def _linear(section: ConfigReader, _: int, __: int | None) -> LinearScaling:
    section.ignore("original_max_position_embeddings")
    return LinearScaling(factor=section.number("factor"))


def _dynamic(section: ConfigReader, longest: int, _: int | None) -> DynamicScaling:
    """transformers stretches from max_position_embeddings, whatever else the section says."""
    section.ignore("original_max_position_embeddings")
    factor = section.number("factor")
    return DynamicScaling(factor=factor, original_max_position_embeddings=longest)


def _llama3(section: ConfigReader, longest: int, window: int | None) -> Llama3Scaling:
    return Llama3Scaling(
        factor=section.number("factor"),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_position_embeddings=_original(section, longest, window),
    )


def _yarn(section: ConfigReader, longest: int, window: int | None) -> YarnScaling:
    section.ignore("finetuned")
    original = _original(section, longest, window)
    factor = section.number("factor")
    given = section.optional_number("attention_factor")
    mscale = section.optional_number("mscale")
    mscale_all_dim = section.optional_number("mscale_all_dim")
    if given is None:
        given = yarn_attention_factor(factor, mscale, mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=section.optional_number("beta_fast") or 32.0,
        beta_slow=section.optional_number("beta_slow") or 1.0,
        truncate=section.boolean("truncate", True),
        attention_factor=given,
    )


def _longrope(section: ConfigReader, longest: int, window: int | None) -> LongRopeScaling:
    original = _original(section, longest, window)
    factor = section.optional_number("factor") or longest / original
    given = section.optional_number("attention_factor")
    if given is None:
        stretched = factor > 1 and original > 1
        given = math.sqrt(1 + math.log(factor) / math.log(original)) if stretched else 1.0
    return LongRopeScaling(
        short_factor=section.numbers("short_factor"),
        long_factor=section.numbers("long_factor"),
        original_max_position_embeddings=original,
        attention_factor=given,
    )


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _original(section: ConfigReader, longest: int, window: int | None) -> int:
    """The window before scaling: the top-level key (as Phi-3 writes it), the section's, or the
    model's window."""
    own = section.optional_integer("original_max_position_embeddings")
    return window or own or longest


def yarn_attention_factor(
    factor: float, mscale: float | None, mscale_all_dim: float | None
) -> float:
    """What YaRN multiplies cos and sin by when the config does not say.

    Source: arXiv:2309.00071, section 3.4 (0.1 ln s + 1); the quotient of two such is DeepSeek's.
    """
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`: the spelling that old and new readers both know."""
    scaling = rope.scaling.model_dump(exclude={"kind"})
    for key in ("short_factor", "long_factor"):
        if key in scaling:
            scaling[key] = list(scaling[key])
    if rope.scaling.kind in ("default", "dynamic"):
        scaling.pop("original_max_position_embeddings", None)
    if scaling.get("truncate") is True:
        del scaling["truncate"]
    written = {"rope_type": rope.scaling.kind, **scaling}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.scaling.kind == "default" else written,
    }
