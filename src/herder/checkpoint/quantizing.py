"""Loading a decoder whose matrices are quantized on the way: one of them is wide at a time.

Owns which are: those of Linear layers and experts. Embedding, head, norms, router and what expands
a latent stay as wide as they are.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from herder.checkpoint.huggingface import load_weights
from herder.checkpoint.source import ModelSource
from herder.config.quantization import WeightQuantization
from herder.errors import WeightsError
from herder.model.build import build_decoder
from herder.model.decoder import Decoder
from herder.model.experts import ExpertWeights
from herder.model.linear import Linear
from herder.model.quantized_weight import quantized
from herder.model.readout import Head


def load_quantized(
    source: ModelSource, how: WeightQuantization, *, dtype: torch.dtype, device: str
) -> Decoder:
    """The model of a source for serving, what is not quantized in `dtype`.

    Raises WeightsError that names the first matrix with a number that is not finite.
    """
    decoder = build_decoder(source.architecture, device="meta", dtype=dtype)
    named = chain(decoder.named_parameters(), decoder.named_buffers())
    names = {id(tensor): name for name, tensor in named}

    def place(live: Tensor, whole: Tensor) -> None:
        name = names[id(live)]
        module_name, leaf = name.rsplit(".", 1)
        module, here = decoder.get_submodule(module_name), whole.to(device)
        if leaf == "weight" and is_quantized(module):
            try:
                value: Tensor = quantized(here, how)
            except ValueError as error:
                raise WeightsError(
                    f"{source.name}: {name} cannot be quantized: {error}. Its file is damaged."
                ) from error
        else:
            value = nn.Parameter(here) if isinstance(live, nn.Parameter) else here
        setattr(module, leaf, value)

    load_weights(decoder, source, device=device, place=place)
    return decoder


def is_quantized(module: nn.Module) -> bool:
    """Whether a module's weight is."""
    return isinstance(module, Linear | ExpertWeights) and not isinstance(module, Head)
