"""A parity case made by transformers, now. The only file that loads that optional package.

Rows are random ids, one of them padded on the left, run as one batch with eager attention in fp32.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from herder.checkpoint.huggingface import save_huggingface
from herder.checkpoint.source import ModelSource
from herder.errors import ModelError, ResourceError
from herder.evaluate.golden import Golden, build_golden
from herder.families.reading import QUANTIZATION
from herder.model.decoder import Decoder

NUM_ROWS = 3
NUM_TOKENS = 40
NUM_PADS = 7
"""Of the last row."""
NUM_GREEDY = 8


def made_by_transformers(source: ModelSource, decoder: Decoder, *, seed: int) -> Golden:
    """What transformers computes with the model's own files on seeded random tokens.

    A Hugging Face folder of plain weights is read by transformers itself, and a GGUF file where
    accelerate is installed. Other sources are written out from `decoder` first, which the origin
    tells: then the reading of weights is not compared. Raises ResourceError without the package,
    ModelError where it refuses the model.
    """
    library = _load_library()
    with tempfile.TemporaryDirectory(prefix="herder-parity-") as scratch:
        try:
            model = _load_model(library, source, decoder, Path(scratch))
        except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
            raise ModelError(f"{source.name}: transformers cannot load it: {error}") from error
    told = "" if _reads_itself(source) else ", with the weights as they were read here"
    is_routed = any(layer.feed_forward == "routed" for layer in source.architecture.layers)
    origin = f"transformers {library.__version__}{told}"
    return _run(model, origin=origin, seed=seed, is_routed=is_routed)


def _reads_itself(source: ModelSource) -> bool:
    if source.weights == "gguf":
        return importlib.util.find_spec("accelerate") is not None
    # Of quantized weights it computes with other numbers, or wants packages that read them.
    return source.weights == "safetensors" and not source.config_json.get(QUANTIZATION)


def _load_library() -> Any:
    try:
        library = importlib.import_module("transformers")
    except ImportError:
        raise ResourceError(
            "comparing with transformers needs that package: pip install 'herder[parity]'. Or "
            "compare with stored logits: --golden DIR."
        ) from None
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def _load_model(library: Any, source: ModelSource, decoder: Decoder, scratch: Path) -> Any:
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if not _reads_itself(source):
        folder = scratch / "model"
        save_huggingface(decoder, folder, family=source.family)
    elif source.weights == "gguf":
        path = source.files[0]
        # Its default keeps blocks packed and computes with them, in other than fp32.
        options["quantization_config"] = library.GgufConfig(dequantize=True)
        options["gguf_file"] = path.name
        folder = path.parent
    else:
        assert source.folder is not None, "a model with safetensors has a folder"
        folder = source.folder
    model = library.AutoModelForCausalLM.from_pretrained(folder, **options)
    model.generation_config = library.GenerationConfig()
    return model.eval()


def _run(model: Any, *, origin: str, seed: int, is_routed: bool) -> Golden:
    generator = np.random.default_rng(seed)
    vocab_size = model.config.get_text_config().vocab_size
    input_ids = generator.integers(0, vocab_size, (NUM_ROWS, NUM_TOKENS))
    mask = np.ones_like(input_ids)
    mask[-1, :NUM_PADS] = 0
    positions = np.maximum(mask.cumsum(-1) - 1, 0)
    given = {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask)}
    # Families whose routers limit groups have no such key, and their loss counts other choices.
    has_aux_loss = is_routed and hasattr(model.config, "router_aux_loss_coef")
    asked = {"output_hidden_states": True, "output_router_logits": has_aux_loss}
    with torch.inference_mode():
        out = model(**given, position_ids=torch.from_numpy(positions), **asked)
        made = model.generate(**given, do_sample=False, max_new_tokens=NUM_GREEDY, pad_token_id=0)
    aux_loss = getattr(out, "aux_loss", None)
    return build_golden(
        origin,
        aux_loss=None if aux_loss is None else float(aux_loss),
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=positions,
        logits=out.logits.numpy(),
        greedy=made[:, NUM_TOKENS:].numpy(),
        hidden_row0=torch.stack([each[0] for each in out.hidden_states]).numpy(),
    )
