"""Logical axes: what the dims of a parameter mean, from a closed set.

Every leaf names the dims of its weight, outputs first; a bias has the dims of the outputs. Which
mesh axis splits a logical axis is a table of `parallel/`, which the model knows nothing of.
"""

from __future__ import annotations

from typing import Literal

Axis = Literal[
    "vocab", "embed", "heads", "kv_heads", "head", "latent", "hidden", "experts", "patch"
]
"""heads and kv_heads: heads side by side, each with all its dims. head: the dims of one head.
hidden: the width of a feed-forward or an expert."""
Axes = tuple[Axis | None, ...]
"""One entry a dim; None: a dim that nothing ever splits."""
