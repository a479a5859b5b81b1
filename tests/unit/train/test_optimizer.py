"""AdamW: what decays, and state that is named by its parameter and complete from the start."""

import torch
from torch import nn

from herder.config.run import OptimizerConfig
from herder.train.optimizer import build_optimizer, optimizer_tensors, set_learning_rate

CONFIG = OptimizerConfig(learning_rate=1e-2, weight_decay=0.5)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))


def train(model: nn.Module, optimizer: torch.optim.AdamW, *, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
        optimizer.step()


def test_only_matrices_decay() -> None:
    model = small_model()
    optimizer = build_optimizer(model.named_parameters(), CONFIG)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 1 - 1e-2 * 0.5 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * kept)


def test_the_update_is_the_fused_one() -> None:
    optimizer = build_optimizer(small_model().named_parameters(), CONFIG)
    assert all(group["fused"] for group in optimizer.param_groups)


def test_the_rate_is_set_in_every_group() -> None:
    optimizer = build_optimizer(small_model().named_parameters(), CONFIG)
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_state_copied_by_name_continues_bit_for_bit() -> None:
    model = small_model()
    optimizer = build_optimizer(model.named_parameters(), CONFIG)
    train(model, optimizer, steps=3)
    other = small_model()
    other.load_state_dict(model.state_dict())
    resumed = build_optimizer(other.named_parameters(), CONFIG)
    saved = optimizer_tensors(optimizer, model.named_parameters())
    for name, tensor in optimizer_tensors(resumed, other.named_parameters()).items():
        tensor.copy_(saved[name])
    train(model, optimizer, steps=2)
    train(other, resumed, steps=2)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_made_before_the_first_step_changes_nothing() -> None:
    plain, prepared = small_model(), small_model()
    first = build_optimizer(plain.named_parameters(), CONFIG)
    second = build_optimizer(prepared.named_parameters(), CONFIG)
    names = optimizer_tensors(second, prepared.named_parameters())
    assert "exp_avg_sq.2.weight" in names
    assert len(names) == 3 * len(list(prepared.parameters()))
    train(plain, first, steps=2)
    train(prepared, second, steps=2)
    for a, b in zip(plain.parameters(), prepared.parameters(), strict=True):
        assert torch.equal(a, b)
