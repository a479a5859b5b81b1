"""Model folders from a Hugging Face hub, by id, through huggingface_hub and its cache."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub

from herder.errors import ModelError

_CONFIGS = ["*.json", "*.jinja", "*.model", "merges.txt"]
_WEIGHTS = ["*.safetensors"]


def fetch(repository: str, *, needs_weights: bool) -> Path:
    """The local folder of a hub repository, fetched or from the cache.

    Raises ModelError when there is no such repository, no right to read it, or no connection.
    """
    patterns = [*_CONFIGS, *_WEIGHTS] if needs_weights else _CONFIGS
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    except huggingface_hub.errors.GatedRepoError:
        reason = "it is gated: accept its terms on the hub, then run `hf auth login`"
    except huggingface_hub.errors.RepositoryNotFoundError:
        reason = "the hub has no such model, or not for you (`hf auth login`)"
    except huggingface_hub.errors.LocalEntryNotFoundError:
        reason = "no hub could be reached and it is not in the cache"
    except OSError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise ModelError(
        f"hub model {repository!r}: {reason}. A folder of that name does not exist here either; "
        "a model that was copied here is named by its folder."
    )
