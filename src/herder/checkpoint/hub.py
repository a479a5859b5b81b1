"""Model folders from a Hugging Face hub, by id, through huggingface_hub and its cache."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub

from herder.errors import ModelError

_CONFIGS = ["*.json", "*.jinja", "*.model", "merges.txt"]
_WEIGHTS = ["*.safetensors"]
_REASONS = {
    "GatedRepoError": "it is gated: accept its terms on the hub, then run `hf auth login`",
    "RepositoryNotFoundError": "the hub has no such model, or not for you (`hf auth login`)",
    "LocalEntryNotFoundError": "no hub could be reached and it is not in the cache",
}


def fetch(repository: str, *, needs_weights: bool) -> Path:
    """The local folder of a hub repository, fetched or from the cache.

    Raises ModelError when there is no such repository, no right to read it, or no connection.
    """
    patterns = [*_CONFIGS, *_WEIGHTS] if needs_weights else _CONFIGS
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"hub model {repository!r}: {_reason(error)}. There is no folder of that name here "
            "either; a model that was copied here is named by its folder."
        ) from None


def _reason(error: Exception) -> str:
    """The hub's errors by name: their classes take a tenth of a second to import."""
    for kind in type(error).__mro__:
        if kind.__name__ in _REASONS:
            return _REASONS[kind.__name__]
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
