"""The C++ operators compute what the Python of their modules computes, and are not needed."""

import logging
from array import array
from types import SimpleNamespace

import pytest
import torch

from herder.config.architecture import NormConfig
from herder.config.quantization import QUANTIZATIONS, WeightQuantization
from herder.model.attention_spec import AttentionSpec
from herder.model.kernels import FEW_QUANTIZED_ROWS, FEW_ROWS, Kernels
from herder.model.linear import Linear, product
from herder.model.mlp import gated
from herder.model.norm import RmsNorm
from herder.model.paged import PagedAttend, Span
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


SPANS = [(13, 1), (40, 1), (5, 9), (1, 50), (16, 16)]
"""First position and number of new tokens."""


def paged(dtype, spec, *, heads, value_dim, has_sinks=False, block_size=4):
    """The attention of SPANS over blocks in no order, which hold nan where nothing was written."""
    generator = torch.Generator().manual_seed(0)
    num_blocks, kv_heads, dim = 200, 2, 40
    keys = torch.full((1, num_blocks, block_size, kv_heads, dim), torch.nan, dtype=dtype)
    values = keys[0, ..., :value_dim] if value_dim < dim else keys.clone()[0]
    order = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = [
        array("q", [next(order) for _ in range(-(-(start + count) // block_size))])
        for start, count in SPANS
    ]
    for (start, _), table in zip(SPANS, tables, strict=True):
        for position in range(start):
            for pool in (values, keys[0]):
                place = pool[table[position // block_size], position % block_size]
                place.copy_(torch.randn(place.shape, generator=generator))
    config = SimpleNamespace(block_size=block_size, num_groups=1, device=torch.device("cpu"))
    config.layers = {0: (0, keys[0], values)}
    spans = [Span(*given, 0, [table]) for given, table in zip(SPANS, tables, strict=True)]
    attend = PagedAttend(config, spans)
    num_tokens = sum(count for _, count in SPANS)
    q, k, v = (
        torch.randn(num_tokens, *shape, generator=generator).to(dtype)
        for shape in ((heads, dim), (kv_heads, dim), (kv_heads, values.shape[-1]))
    )
    v = k[..., :value_dim] if value_dim < dim else v
    sinks_N = torch.randn(heads, generator=generator).to(dtype) if has_sinks else None
    return attend.layer(0)(q, k, v, spec, sinks_N)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [2, 6, 80])
@pytest.mark.parametrize(("kind", "window"), [("full", 0), ("sliding", 15), ("chunked", 12)])
def test_attention_over_blocks(both, dtype, heads, kind, window):
    spec = AttentionSpec(kind, window, 0.2)
    both(lambda: paged(dtype, spec, heads=heads, value_dim=40))


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("value_dim", [40, 24])
@pytest.mark.parametrize("block_size", [1, 16, 37])
def test_caps_sinks_narrow_values_and_any_size_of_block(
    both, softcap, has_sinks, value_dim, block_size
):
    spec = AttentionSpec("sliding", 9, 0.2, softcap)
    given = {"value_dim": value_dim, "has_sinks": has_sinks, "block_size": block_size}
    both(lambda: paged(torch.float32, spec, heads=6, **given))


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
