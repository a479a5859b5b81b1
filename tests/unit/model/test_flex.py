"""The GPU's attention computes the reference's, as far as a CPU can tell: forward, and blocks."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from herder.model import flex
from herder.model.attend import PackedAttend
from herder.model.attention_spec import AttentionSpec
from tests.reference_attend import ReferenceAttend

SPECS = [
    AttentionSpec("full", 0, 0.3),
    AttentionSpec("sliding", 1, 0.3),
    AttentionSpec("sliding", 150, 0.3),
    AttentionSpec("chunked", 90, 0.3),
]
CAPPED = [replace(spec, logit_softcap=0.7) for spec in SPECS]
LENGTHS = [(1,), (70, 70, 30, 170), (128, 128), (1, 1, 300), (640,)]


def random_qkv(num_tokens: int, value_dim: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((6, 16), (2, 16), (2, value_dim))
    return [torch.randn(num_tokens, *shape, generator=generator) for shape in shapes]


def mask_of(lengths: tuple[int, ...], spec: AttentionSpec) -> flex.BlockMask:
    first_T = flex.first_keys(lengths, spec.kind, spec.window, device="cpu")
    return flex.block_mask(first_T)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """The eager kernel counts its graphs too, and there is a limit to them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_first_key_and_all_up_to_the_query_are_what_the_rule_allows(lengths, spec):
    first_T = flex.first_keys(lengths, spec.kind, spec.window, device="cpu")
    token_T = torch.arange(sum(lengths))
    seen_TT = (token_T >= first_T[:, None]) & (token_T <= token_T[:, None])
    assert torch.equal(seen_TT, ReferenceAttend(lengths).mask_TT(spec, torch.device("cpu")))
    assert bool((first_T.diff() >= 0).all())


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_table_of_blocks_is_the_one_torch_makes_of_the_whole_mask(lengths, spec):
    mask, num_tokens = mask_of(lengths, spec), sum(lengths)
    expected = create_block_mask(mask.mask_mod, 1, 1, num_tokens, num_tokens, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, wanted = (
            getattr(mask, f"{name}_num_blocks"),
            getattr(expected, f"{name}_num_blocks"),
        )
        assert torch.equal(counts, wanted), name
        listed, order = getattr(mask, f"{name}_indices"), getattr(expected, f"{name}_indices")
        for row, count in enumerate(counts.flatten().tolist()):
            assert listed[0, 0, row, :count].tolist() == order[0, 0, row, :count].tolist(), name


@pytest.mark.parametrize("spec", [*SPECS, *CAPPED], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_it_computes_what_the_reference_does(spec, with_sinks):
    lengths = (70, 70, 30, 170)
    sinks_N = torch.randn(6, generator=torch.Generator().manual_seed(5)) if with_sinks else None
    inputs = random_qkv(sum(lengths), value_dim=24)
    out = flex.attend_flex(*inputs, mask_of(lengths, spec), spec, sinks_N)
    expected = ReferenceAttend(lengths)(*inputs, spec, sinks_N)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_a_long_window_costs_blocks_of_its_width_and_not_of_the_sequence():
    mask = mask_of((64 * flex.BLOCK,), AttentionSpec("sliding", 2 * flex.BLOCK, 0.3))
    looked_at = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert int(looked_at.max()) == 3


def test_new_documents_and_layers_of_one_kind_compile_nothing_again():
    """The mask comes with the attend, as data: a compiled layer has one graph a kind."""
    spec = AttentionSpec("sliding", 40, 0.3, logit_softcap=0.7)

    class Attend(PackedAttend):
        """Flex attention on a CPU, where there are no gradients to compute."""

        def __init__(self, lengths):
            super().__init__(lengths)
            self.masks = {("sliding", 40): mask_of(lengths, spec)}

        def __call__(self, q_TNH, k_TKH, v_TKH, spec, sinks_N=None):
            mask = self.masks[spec.kind, spec.window]
            return flex.attend_flex(q_TNH, k_TKH, v_TKH, mask, spec, sinks_N)

    class Layer(torch.nn.Module):
        def forward(self, q_TNH, k_TKH, v_TKH, attend):
            return attend(q_TNH, k_TKH, v_TKH, spec) + 1

    layers = [Layer(), Layer()]
    for layer in layers:
        layer.compile(backend="eager", fullgraph=True)
    counters.clear()
    inputs = random_qkv(300)
    for lengths in ((300,), (100, 200), (1, 98, 1, 200)):
        expected = ReferenceAttend(lengths)(*inputs, spec) + 1
        attend = Attend(lengths)
        for layer in layers:
            out = layer(*inputs, attend)
            torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_heads_too_narrow_for_the_kernel_are_told_apart():
    wide, narrow = torch.ones(2, 1, 16), torch.ones(2, 1, 8)
    assert flex.takes(wide, wide)
    assert not flex.takes(narrow, wide)
    assert not flex.takes(wide, narrow)
