"""The gated feed-forward keeps little for its backward pass and computes the plain formula."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from herder.config.architecture import MlpConfig
from herder.errors import ModelError
from herder.model.mlp import Mlp, activate

PLAIN = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def build(activation: str, dtype: torch.dtype = torch.float64) -> Mlp:
    config = MlpConfig(intermediate_size=6, activation=activation, bias=True)
    torch.manual_seed(0)
    return Mlp(4, config, device="cpu", dtype=dtype)


@pytest.mark.parametrize("activation", PLAIN)
def test_outputs_and_gradients_equal_the_plain_formula(activation):
    mlp = build(activation)
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    plain = mlp.down(PLAIN[activation](mlp.gate(x)) * mlp.up(x))
    leaves = [x, *mlp.parameters()]
    expected = [plain, *torch.autograd.grad(plain.square().sum(), leaves)]
    out = mlp(x)
    actual = [out, *torch.autograd.grad(out.square().sum(), leaves)]
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), plain)


def test_of_the_wide_activations_only_gate_and_up_are_kept():
    mlp = build("silu")
    storages = set()

    def remember(tensor):
        if tensor.shape == (9, 6):
            storages.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        mlp(torch.randn(9, 4, dtype=torch.float64, requires_grad=True))
    assert len(storages) == 2


def test_an_activation_of_experts_is_refused():
    with pytest.raises(ModelError, match="clamped_swiglu"):
        activate(torch.zeros(1), "clamped_swiglu")
