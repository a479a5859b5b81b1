"""From a record to a model: on the meta device, then real; weights depend on names alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from herder.config.architecture import ArchitectureConfig
from herder.errors import ModelError
from herder.model.decoder import Decoder
from herder.model.experts import ExpertWeights
from herder.model.norm import RmsNorm


def build_decoder(
    config: ArchitectureConfig, *, device: str = "meta", dtype: torch.dtype = torch.float32
) -> Decoder:
    """The decoder, its parameters uninitialized; on "meta" they take no memory.

    Raises ModelError for an architecture that needs a computation this build does not have.
    """
    missing = unsupported_parts(config)
    if missing:
        raise ModelError(f"this architecture needs {', '.join(missing)}: not supported yet")
    decoder = Decoder(config, device=device, dtype=dtype)
    tie(decoder)
    return decoder.requires_grad_(True)


def unsupported_parts(config: ArchitectureConfig) -> list[str]:
    """Computations the record asks for that `model/` cannot do."""
    parts = {
        "cross-attention": any(layer.cross_attention for layer in config.layers),
        "sectioned rope": any(rope.sections is not None for rope in config.ropes),
        "a vision encoder": config.vision is not None,
    }
    return [name for name, needed in parts.items() if needed]


def tie(decoder: Decoder) -> None:
    """Makes head and embedding one parameter where the config says so.

    To be called again after anything that replaces parameters: materializing, sharding.
    """
    if decoder.config.tie_embeddings and decoder.embed is not None and decoder.head is not None:
        decoder.head.weight = decoder.embed.weight


def materialize(decoder: Decoder, *, device: str | torch.device) -> None:
    """Gives a decoder built on the meta device real, uninitialized memory."""
    decoder.to_empty(device=device)
    tie(decoder)


def copy_whole(parameter: Tensor, value: Tensor) -> None:
    """Fill a parameter of which this process holds all."""
    parameter.copy_(value)


def initialize_weights(
    decoder: Decoder, *, seed: int, place: Callable[[Tensor, Tensor], None] = copy_whole
) -> None:
    """Random weights that depend on (seed, name) alone, never on layout, order or device.

    place(parameter, value): puts a whole value where it is held, one parameter at a time. Buffers,
    which gradients never touch, start at 0.
    """
    with torch.no_grad():
        for module_name, module in decoder.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                full_name = f"{module_name}.{name}"
                if module is decoder.head and decoder.config.tie_embeddings:
                    if decoder.embed is not None:
                        continue
                    full_name = f"embed.{name}"  # the copy on the last pipeline stage
                place(parameter, initial_value(decoder.config, module, full_name, seed=seed))
            for buffer in module.buffers(recurse=False):
                buffer.zero_()


def initial_value(config: ArchitectureConfig, module: nn.Module, name: str, *, seed: int) -> Tensor:
    """One parameter's whole initial value in fp32 on the host.

    Norm weights start at 1 (stored as 0 where an offset is added), biases at 0, all else is normal
    with initializer_range as its standard deviation. Each expert draws by a name of its own.
    """
    shape = module.get_parameter(name.rsplit(".", 1)[1]).shape
    if isinstance(module, RmsNorm):
        return torch.full(shape, 1.0 - module.weight_offset)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if isinstance(module, ExpertWeights):
        value = torch.empty(shape)
        for expert in range(shape[0]):
            value[expert] = _normal(shape[1:], config, f"{name}.{expert}", seed)
        return value
    return _normal(shape, config, name, seed)


def _normal(shape: torch.Size, config: ArchitectureConfig, name: str, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
    return torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)


def num_parameters(decoder: Decoder) -> int:
    """Parameters of the model, tied ones once."""
    return sum(parameter.numel() for parameter in decoder.parameters())
