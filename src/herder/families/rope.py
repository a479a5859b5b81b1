"""The rope keys of a config.json, in all their spellings, as a RopeConfig and back.

Owns where theta and scaling may stand and what each kind's missing fields mean. Formulas of the
frequencies are the model's; only attention factors are computed here, for they come from several
keys that nothing else needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    **{kind: kind for kind in ("default", "linear", "dynamic", "yarn", "llama3", "longrope")},
    "su": "longrope",
}
_DEFAULT = DefaultScaling()
THETA = 10_000.0
"""What an absent rope_theta means for most families. Source: transformers, default_theta."""


def read_rope(
    reader: ConfigReader,
    *,
    head_dim: int,
    max_position_embeddings: int,
    theta: float = THETA,
    original: int | None = None,
    rotates_part: bool = False,
    interleaved: bool = False,
    absent: RopeScaling = _DEFAULT,
    sections: Sequence[ConfigReader] | None = None,
) -> RopeConfig:
    """One rotary table, from the sections that describe it, which must agree.

    Without sections it is the one of a decoder: from `rope_theta`, `rope_scaling` (`type` or
    `rope_type`), and `rope_parameters`, whose theta wins over the top-level one. Both mappings may
    stand side by side: versions of transformers differ in which they would take. theta, original
    (the window before scaling) and absent (scaling) are what absent keys mean; rotates_part:
    partial_rotary_factor counts.
    """
    partial = None
    if sections is None:
        given = map(reader.optional_section, ("rope_parameters", "rope_scaling"))
        sections = [section for section in given if section is not None]
        theta = reader.number("rope_theta", theta)
        original = reader.optional_integer("original_max_position_embeddings", original)
        partial = reader.optional_number("partial_rotary_factor")
    found: list[tuple[float, float | None, RopeScaling]] = []
    for section in sections:
        # As Phi-3 writes it, the original window stands outside.
        own = section.optional_integer("original_max_position_embeddings")
        share = section.optional_number("partial_rotary_factor") or partial
        scaling = _scaling(section, max_position_embeddings, original or own)
        found.append((section.number("rope_theta", theta), share, scaling))
    if len(found) == 2 and found[0] != found[1] and not reader.problems:
        reader.problem(
            "rope_parameters and rope_scaling describe different rotations; keep only the right one"
        )
    theta, partial, scaling = found[0] if found else (theta, partial, absent)
    if scaling.kind != "default" and partial not in (None, 1.0) and not rotates_part:
        reader.problem(
            f"partial_rotary_factor={partial} with rope {scaling.kind!r}: this family rotates "
            "whole heads"
        )
    rotary_dim = int(head_dim * (partial or 1.0)) if rotates_part else head_dim
    try:
        return RopeConfig(
            theta=theta, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling
        )
    except ValidationError as error:
        if not reader.problems:
            for each in error.errors():
                reader.problem(f"rope: {each['msg'].removeprefix('Value error, ')}")
        return RopeConfig(theta=theta, rotary_dim=2)


def _scaling(section: ConfigReader, longest: int, window: int | None) -> RopeScaling:
    """`window`: before scaling, where the config says; else it is the model's, `longest`."""
    kind_key = "rope_type" if section.has("rope_type") or not section.has("type") else "type"
    section.ignore("type", "rope_type")
    kind = section.choice(kind_key, _KINDS, "default")
    original = window or longest
    match kind:
        case "linear":
            return LinearScaling(factor=section.number("factor"))
        case "dynamic":
            # transformers stretches from the model's window, whatever else the section says.
            factor = section.number("factor")
            return DynamicScaling(factor=factor, original_max_position_embeddings=longest)
        case "llama3":
            return Llama3Scaling(
                factor=section.number("factor"),
                low_freq_factor=section.number("low_freq_factor"),
                high_freq_factor=section.number("high_freq_factor"),
                original_max_position_embeddings=original,
            )
        case "yarn":
            return _yarn(section, original)
        case "longrope":
            return _longrope(section, longest, original)
    section.neutral("factor", 1, None)
    return DefaultScaling()


def _yarn(section: ConfigReader, original: int) -> YarnScaling:
    section.ignore("finetuned")
    factor = section.number("factor")
    mscale = section.optional_number("mscale")
    mscale_all_dim = section.optional_number("mscale_all_dim")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=section.optional_number("beta_fast") or 32.0,
        beta_slow=section.optional_number("beta_slow") or 1.0,
        truncate=section.boolean("truncate", True),
        attention_factor=section.optional_number("attention_factor")
        or yarn_attention_factor(factor, mscale, mscale_all_dim),
    )


def _longrope(section: ConfigReader, longest: int, original: int) -> LongRopeScaling:
    factor = section.optional_number("factor") or longest / original
    is_stretched = factor > 1 and original > 1
    own = math.sqrt(1 + math.log(factor) / math.log(original)) if is_stretched else 1.0
    return LongRopeScaling(
        short_factor=section.numbers("short_factor"),
        long_factor=section.numbers("long_factor"),
        original_max_position_embeddings=original,
        attention_factor=section.optional_number("attention_factor") or own,
    )


def yarn_attention_factor(
    factor: float, mscale: float | None, mscale_all_dim: float | None
) -> float:
    """What YaRN multiplies cos and sin by when the config does not say.

    Source: arXiv:2309.00071, section 3.4 (0.1 ln s + 1); the quotient of two such is DeepSeek's.
    """
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """0.1 * weight * ln(factor) + 1. Source: DeepSeek-V2's modeling_deepseek, yarn_get_mscale."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`: the spelling that old and new readers both know."""
    scaling = rope.scaling.model_dump(mode="json", exclude={"kind"})
    if rope.scaling.kind == "dynamic":
        del scaling["original_max_position_embeddings"]
    if scaling.get("truncate") is True:
        del scaling["truncate"]
    written = {"rope_type": rope.scaling.kind, **scaling}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.scaling.kind == "default" else written,
    }
