"""Which attention each layer has: the layer_types key, and the patterns that stand in for it.

Owns the kinds' names and their windows' keys being there. What an absent key means is the family's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from herder.config.architecture import ArchitectureConfig, LayerSpec
from herder.families.reading import ConfigReader

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_KINDS: dict[str, Literal["full", "sliding", "chunked"]] = {
    FULL: "full",
    SLIDING: "sliding",
    CHUNKED: "chunked",
}
_HF_KINDS = {ours: hf for hf, ours in _KINDS.items()}


def all_but(interval: int, num_layers: int) -> list[bool]:
    """False for each interval-th layer, counted from 1."""
    return [(index + 1) % interval != 0 for index in range(num_layers)]


def read_layers(
    reader: ConfigReader,
    default: Iterable[bool],
    *,
    window: int | None,
    kind: str = SLIDING,
) -> tuple[LayerSpec, ...]:
    """The layers: those that layer_types says, or else by default, have a window; others are full.

    window: keys, or a chunk's length; None: there is none, and no layer may have one.
    """
    num_layers = reader.integer("num_hidden_layers")
    types = reader.optional_texts("layer_types")
    if types is None:
        types = [kind if has and window is not None else FULL for has in default]
    if len(types) != num_layers:
        reader.problem(f"layer_types has {len(types)} entries, num_hidden_layers={num_layers}")
    unknown = sorted({each for each in types if each not in (FULL, kind)})
    if unknown:
        reader.problem(f"layer_types has {', '.join(unknown)}; known: {FULL}, {kind}")
    if kind in types and window is None:
        reader.problem(f"layer_types has {kind}, but the window it needs is absent or switched off")
    windowed = LayerSpec() if window is None else LayerSpec(attention=_KINDS[kind], window=window)
    return tuple(windowed if each == kind else LayerSpec() for each in types)


def equal_layers(reader: ConfigReader, window: int | None) -> tuple[LayerSpec, ...]:
    """Layers that all slide, or none."""
    layer = LayerSpec() if window is None else LayerSpec(attention="sliding", window=window)
    return (layer,) * reader.integer("num_hidden_layers")


def read_rotating(reader: ConfigReader, *, empty_is_absent: bool) -> list[bool]:
    """Which layers rotate: no_rope_layers, whose 1 means that one does, or all but each fourth."""
    num_layers = reader.integer("num_hidden_layers")
    interval = reader.integer("no_rope_layer_interval", 4)
    given = reader.optional_integers("no_rope_layers")
    if given is None or (empty_is_absent and not given):
        return all_but(interval, num_layers)
    if len(given) < num_layers:
        reader.problem(f"no_rope_layers has {len(given)} entries, num_hidden_layers={num_layers}")
    return [flag != 0 for flag in (given + [1] * num_layers)[:num_layers]]


def with_rotation(layers: Iterable[LayerSpec], rotating: Iterable[bool]) -> tuple[LayerSpec, ...]:
    """The layers, those that do not rotate without a rope."""
    return tuple(
        layer if rotates else layer.model_copy(update={"rope": None})
        for layer, rotates in zip(layers, rotating, strict=False)
    )


def write(architecture: ArchitectureConfig) -> list[str]:
    """The layer_types key."""
    return [_HF_KINDS[layer.attention] for layer in architecture.layers]


def no_rope_layers(architecture: ArchitectureConfig) -> list[int]:
    """The no_rope_layers key."""
    return [int(layer.rope is not None) for layer in architecture.layers]


def window_of(layers: Sequence[LayerSpec]) -> int | None:
    """The window, or the chunk's length, of the layers that have one."""
    return next((layer.window for layer in layers if layer.window is not None), None)


def layers_with(architecture: ArchitectureConfig, feed_forward: str) -> tuple[int, ...]:
    """Indices of the dense or of the routed layers."""
    kinds = [layer.feed_forward for layer in architecture.layers]
    return tuple(index for index, kind in enumerate(kinds) if kind == feed_forward)
