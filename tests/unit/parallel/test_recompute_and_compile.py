"""Recompute and compile: the same numbers, the same classes and names, and no silent fallback."""

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from herder.errors import ResourceError
from herder.model.attend import PackedAttend
from herder.model.decoder import Decoder
from herder.model.readout import LossReadout
from herder.parallel.compile import apply_compile
from herder.parallel.recompute import apply_recompute
from tests.tiny import initialized, micro_batch, tiny_model

LENGTHS = (7, 4, 13)


def tiny_decoder() -> Decoder:
    return initialized(tiny_model("ddd", tie_embeddings=False))


def loss_and_gradients(
    decoder: Decoder, lengths: tuple[int, ...] = LENGTHS
) -> tuple[float, dict[str, torch.Tensor]]:
    batch = micro_batch(5, sum(lengths), lengths=lengths)
    decoder.zero_grad()
    loss = decoder(
        batch.tokens_T,
        positions_T=batch.positions_T,
        attend=PackedAttend(lengths),
        readout=LossReadout(batch.targets_T, batch.weights_T, chunk_tokens=16),
    )
    loss.backward()
    named = decoder.named_parameters()
    return loss.item(), {name: p.grad for name, p in named if p.grad is not None}


def shape_of(module: nn.Module) -> list[tuple[str, type, object]]:
    return [(name, type(each), type(each).forward) for name, each in module.named_modules()]


def test_recompute_gives_bitwise_equal_loss_and_gradients() -> None:
    plain, recomputed = tiny_decoder(), tiny_decoder()
    apply_recompute(recomputed.layers, "full")
    expected_loss, expected = loss_and_gradients(plain)
    loss, gradients = loss_and_gradients(recomputed)
    assert loss == expected_loss
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_recompute_keeps_classes_names_and_forwards_and_runs_layers_twice() -> None:
    decoder = tiny_decoder()
    before, names = shape_of(decoder), [name for name, _ in decoder.named_parameters()]
    runs = list[int]()
    decoder.layers["0"].get_submodule("attention").register_forward_hook(lambda *_: runs.append(1))
    loss_and_gradients(decoder)
    assert len(runs) == 1
    apply_recompute(decoder.layers, "full")
    assert shape_of(decoder) == before
    assert [name for name, _ in decoder.named_parameters()] == names
    loss_and_gradients(decoder)
    assert len(runs) == 3


def test_recompute_none_leaves_the_layers_alone() -> None:
    decoder = tiny_decoder()
    runs = list[int]()
    decoder.layers["0"].register_forward_hook(lambda *_: runs.append(1))
    apply_recompute(decoder.layers, "none")
    loss_and_gradients(decoder)
    assert len(runs) == 1


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    before = torch._dynamo.config.fail_on_recompile_limit_hit
    yield
    torch._dynamo.config.fail_on_recompile_limit_hit = before
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo hides it itself
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
def test_compiled_layers_give_equal_losses_from_one_graph_for_any_documents() -> None:
    plain, compiled = tiny_decoder(), tiny_decoder()
    before = shape_of(compiled)
    apply_recompute(compiled.layers, "full")
    apply_compile(compiled.layers, device_type="cpu")
    assert shape_of(compiled) == before
    torch._dynamo.utils.counters.clear()
    for lengths in (LENGTHS, (20, 4), (3, 3, 3, 3, 12)):
        expected_loss, expected = loss_and_gradients(plain, lengths)
        loss, gradients = loss_and_gradients(compiled, lengths)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
def test_hitting_the_recompile_limit_is_an_error_and_not_a_slow_run() -> None:
    class Scale(nn.Module):
        """Needs a graph of its own for every kind of factor."""

        def forward(self, x: torch.Tensor, factor: object) -> torch.Tensor:
            assert isinstance(factor, int | float | torch.Tensor), "a factor is a number"
            return x * factor

    layer = Scale()
    apply_compile(nn.ModuleDict({"0": layer}), device_type="cuda")
    layer.compile(backend="eager")

    def call_with_many_kinds() -> None:
        for factor in (2, 2.5, torch.ones(()), True):
            layer(torch.ones(3), factor)

    # Not monkeypatch: undoing deletes the entry of torch's config for the rest of the process.
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(FailOnRecompileLimitHit):
        call_with_many_kinds()


def test_compiling_on_a_cpu_without_a_compiler_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ResourceError, match=r"needs a C\+\+ compiler"):
        apply_compile(nn.ModuleDict(), device_type="cpu")
