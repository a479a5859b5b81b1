"""The state of every random number generator of this process, as JSON and back, bit for bit.

Batches are drawn from (seed, step) and the loader has no workers with generators of their own; what
is kept here is what any other code may have drawn from.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from herder.errors import CheckpointError


def capture_random_state() -> dict[str, JsonValue]:
    """States of torch (CPU and every CUDA device), numpy and random."""
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in cuda],
        "numpy": [name, [int(word) for word in key], int(position), int(has_gauss), cached],
        "random": [version, list(words), gauss],
        "workers": [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set all generators to a captured state.

    CUDA states are set where as many devices are visible as when captured; elsewhere the devices
    keep their own. Raises CheckpointError for a state that cannot be one.
    """
    try:
        torch.set_rng_state(_tensor(state["torch"]))
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([_tensor(text) for text in state["cuda"]])
        name, key, position, has_gauss, cached = state["numpy"]
        words = np.array(key, dtype=np.uint32)
        np.random.set_state((name, words, position, has_gauss, cached))
        version, integers, gauss = state["random"]
        random.setstate((version, tuple(integers), gauss))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's random states cannot be set: {error}") from error


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
