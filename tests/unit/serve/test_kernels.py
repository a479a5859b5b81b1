"""The C++ operators compute what the Python of their modules computes, and are not needed."""

import logging

import pytest
import torch

from herder.config.architecture import NormConfig
from herder.config.quantization import QUANTIZATIONS, WeightQuantization
from herder.model.attention_spec import AttentionSpec
from herder.model.cache import attend_cached
from herder.model.kernels import FEW_QUANTIZED_ROWS, FEW_ROWS, Kernels
from herder.model.linear import Linear, product
from herder.model.mlp import gated
from herder.model.norm import RmsNorm
from herder.model.quantized_weight import quantized
from herder.model.rope import RotaryTables, rotate
from herder.serve.kernels import load_kernels

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def both(monkeypatch):
    """Runs a computation with the operators and without them."""
    load_kernels()
    assert Kernels.operators is not None, "no C++ compiler on this machine"

    def compare(compute, *, exactly: bool = False) -> None:
        with torch.no_grad():
            fast = compute()
            with monkeypatch.context() as patch:
                patch.setattr(Kernels, "operators", None)
                plain = compute()
        assert fast.dtype == plain.dtype
        if exactly:
            assert torch.equal(fast, plain)
            return
        # bf16 keeps 8 bits: sums in another order differ by one rounding of the result at most.
        tolerance = 2**-7 if fast.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(fast, plain, rtol=tolerance, atol=tolerance)

    return compare


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_few_rows_and_of_many(both, dtype, rows, has_bias):
    layer = Linear(70, 37, axes=("heads", "embed"), bias=has_bias, device="cpu", dtype=dtype)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    both(lambda: layer(numbers(rows, 70, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize(("num_inputs", "size"), [(70, 32), (96, 64), (200, 128), (160, 32)])
@pytest.mark.parametrize("rows", [1, 2, 7, FEW_QUANTIZED_ROWS, FEW_QUANTIZED_ROWS + 1])
def test_products_with_quantized_weights(both, dtype, name, num_inputs, size, rows):
    matrix = numbers(37, num_inputs, dtype=torch.float32, seed=1)
    weight = quantized(matrix, WeightQuantization(name, size))
    bias = numbers(37, dtype=dtype, seed=2) if rows == 2 else None
    # Codes of 8 bits are summed before what all of a group have in common is taken off.
    both(lambda: product(numbers(rows, num_inputs, dtype=dtype) / 16, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZATIONS)
@pytest.mark.parametrize("num_inputs", [33, 70, 128])
def test_quantized_matrices_put_together(both, dtype, name, num_inputs):
    experts = quantized(numbers(3, 5, num_inputs, dtype=dtype), WeightQuantization(name, 32))
    both(lambda: experts.wide(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"weight_offset": 1},
        {"multiply_in_fp32": True},
        {"weight_offset": 1, "multiply_in_fp32": True},
    ],
    ids=str,
)
def test_norms_of_rows_and_of_heads(both, dtype, fields):
    layer = RmsNorm(70, NormConfig(eps=1e-3, **fields), axis="embed", device="cpu", dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(numbers(70, dtype=dtype, seed=1))
    both(lambda: layer(numbers(5, 70, dtype=dtype)))
    both(lambda: layer(numbers(5, 3, 70, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [12, 20])
def test_rotations_whole_and_partial(both, dtype, interleaved, head_dim):
    angles_TR = torch.arange(30).view(5, 6).float()
    tables = RotaryTables(angles_TR.cos(), angles_TR.sin(), interleaved=interleaved)
    projection = numbers(5, 3 * head_dim, dtype=dtype)
    exactly = dtype == torch.bfloat16  # fp32 may fuse a product into a sum
    both(lambda: rotate(projection.view(5, 3, head_dim), tables), exactly=exactly)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_product(both, dtype):
    gate, up = numbers(5, 70, dtype=dtype), numbers(5, 70, dtype=dtype, seed=1)
    both(lambda: gated(gate, up, "silu", lambda product: product))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 4])
def test_the_attention_of_one_token_over_part_of_a_cache(both, dtype, first):
    keys, values = (numbers(2, 30, 40, dtype=dtype, seed=seed)[:, first:19] for seed in (1, 2))
    spec = AttentionSpec("sliding", 15, 0.2)
    q_TNH = numbers(1, 6, 40, dtype=dtype)
    both(lambda: attend_cached(q_TNH, keys, values, spec, start=18, first=first))


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("value_dim", [40, 24])
def test_capped_logits_sinks_and_narrow_values_of_one_token(both, softcap, has_sinks, value_dim):
    keys = numbers(2, 19, 40, dtype=torch.float32, seed=1)
    values = keys[..., :value_dim]
    sinks_N = numbers(6, dtype=torch.float32, seed=3) if has_sinks else None
    spec = AttentionSpec("full", 0, 0.2, softcap)
    q_TNH = numbers(1, 6, 40, dtype=torch.float32)
    both(lambda: attend_cached(q_TNH, keys, values, spec, sinks_N, start=18, first=0))


def test_shapes_that_do_not_fit_are_refused():
    load_kernels()
    with torch.no_grad(), pytest.raises(RuntimeError, match="do not multiply"):
        Kernels.operators.few_rows_product(torch.ones(1, 3), torch.ones(2, 4), None)
    words = quantized(torch.ones(2, 64), WeightQuantization("int4", 32)).data
    with torch.no_grad(), pytest.raises(RuntimeError, match="has 19 words a row, not 10"):
        Kernels.operators.quantized_product(torch.ones(1, 70), words[:, :10], None, 4, 32)


def test_gradients_and_autocast_are_left_to_torch():
    load_kernels()
    assert not Kernels.take(torch.ones(1))
    with torch.no_grad():
        assert Kernels.take(torch.ones(1))
        assert not Kernels.take(torch.ones(1, dtype=torch.float64))
        with torch.autocast("cpu", torch.bfloat16):
            assert not Kernels.take(torch.ones(1))


def test_without_a_compiler_a_warning_says_what_it_costs(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("HERDER_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        load_kernels()
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_leaves_nothing_and_is_no_error(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("HERDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    compiler.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        load_kernels()
    assert "broken" in caplog.text
    assert not list((tmp_path / "cache" / "kernels").glob("[!.]*"))
