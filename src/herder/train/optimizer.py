"""AdamW over a decoder's parameters, and its state as plain tensors under the parameters' names.

Knows nothing of steps, schedules or files. The names make checkpoints independent of the order of
parameters and, later, of how they are sharded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from herder.config.run import OptimizerConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> AdamW:
    """Fused AdamW: matrices decay; norms, sinks (1-D) and biases do not. A group for each, and for
    each mesh that parameters are spread over, since a fused update takes one of them.

    Decay of gains and biases does not regularize and costs quality. Source: the grouping of
    Llama-style training code; see arXiv:1706.05350 for why decay of normed weights differs.
    """
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            # The biases of a layer's experts are stacked: they have two dims.
            decays = parameter.ndim >= 2 and not name.endswith(".bias")
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((decays, mesh), []).append(parameter)
    return AdamW(
        [
            {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0}
            for (decays, _), parameters in groups.items()
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    """The rate of the next step, in all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(
    optimizer: AdamW, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """The optimizer's own state tensors, named `<moment>.<parameter>`, allocated where missing.

    Loading copies into them. Before the first step they are zeros, which is what AdamW starts from,
    so a save at step 0 and a load before any step need no case of their own.
    """
    tensors = dict[str, Tensor]()
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for key in ("step", *_MOMENTS):
            tensors[f"{key}.{name}"] = state[key]
    return tensors
