"""The fused loss is cross-entropy, to the last gradient."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from herder.model.attend import PackedAttend
from herder.model.kernels import Kernels
from herder.model.readout import Head, LastTokenReadout, LogProbReadout, LossReadout

LENGTHS = [9, 12, 4]


@pytest.fixture
def targets(pack):
    targets_T = pack([25])[0].flip(0)
    weights_T = torch.rand(25, generator=torch.Generator().manual_seed(1))
    weights_T[9:12] = 0
    return targets_T, weights_T


def run(decoder, pack, readout):
    tokens_T, positions_T = pack(LENGTHS)
    return decoder(tokens_T, positions_T=positions_T, attend=PackedAttend(LENGTHS), readout=readout)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_tokens", [4, 25, 512])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_chunked_loss_and_its_gradients_equal_cross_entropy(
    make_decoder, pack, targets, tied, chunk_tokens, softcap
):
    decoder = make_decoder(tie_embeddings=tied, final_logit_softcap=softcap)
    targets_T, weights_T = targets
    results = []
    for fused in (False, True):
        decoder.zero_grad()
        if fused:
            readout = LossReadout(targets_T, weights_T, chunk_tokens=chunk_tokens)
            loss = run(decoder, pack, readout)
        else:
            losses_T = F.cross_entropy(run(decoder, pack, None), targets_T, reduction="none")
            loss = (losses_T * weights_T).sum()
        (loss * 0.5).backward()
        results.append([loss.detach(), *(p.grad.clone() for p in decoder.parameters())])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_inputs_and_of_weights_may_be_taken_apart(make_decoder, pack, targets):
    whole, apart = make_decoder(), make_decoder()
    (run(whole, pack, LossReadout(*targets)) * 0.5).backward()
    loss = run(apart, pack, LossReadout(*targets)) * 0.5
    inwards, head = list(apart.layers.parameters()), apart.head.weight
    for parameter, gradient in zip(
        inwards, torch.autograd.grad(loss, inwards, retain_graph=True), strict=True
    ):
        parameter.grad = gradient
    (head.grad,) = torch.autograd.grad(loss, [head])
    for name, parameter in [*apart.layers.named_parameters(prefix="layers"), ("head.weight", head)]:
        assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name


def test_capped_logits_are_capped_for_every_readout(make_decoder, pack, targets):
    capped = make_decoder(final_logit_softcap=1.5)
    logits_TV = run(make_decoder(), pack, None)
    expected_TV = 1.5 * torch.tanh(logits_TV / 1.5)
    assert logits_TV.abs().max() > 3
    torch.testing.assert_close(run(capped, pack, None), expected_TV)
    rows = torch.tensor([8, 20])
    torch.testing.assert_close(run(capped, pack, LastTokenReadout(rows)), expected_TV[rows])
    targets_T, _ = targets
    expected_T = expected_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]
    torch.testing.assert_close(run(capped, pack, LogProbReadout(targets_T)), expected_T)


def test_a_frozen_head_still_passes_gradients_on(make_decoder, pack, targets):
    decoder = make_decoder()
    decoder.head.requires_grad_(False)
    run(decoder, pack, LossReadout(*targets)).backward()
    assert decoder.head.weight.grad is None
    assert decoder.norm.weight.grad.abs().sum() > 0


def test_tokens_of_weight_zero_have_no_say(make_decoder, pack, targets):
    targets_T, weights_T = targets
    changed_T = torch.where(weights_T == 0, (targets_T + 1) % 97, targets_T)
    decoder = make_decoder()
    losses = [run(decoder, pack, LossReadout(t, weights_T)) for t in (targets_T, changed_T)]
    assert torch.equal(*losses)


def test_logits_of_all_tokens_are_never_allocated_at_once(make_decoder, pack, targets):
    class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
        num_elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.num_elements = max(self.num_elements, result.numel())
            return result

    decoder = make_decoder(vocab_size=5_000, hidden_size=8)
    with LargestTensor() as largest:
        run(decoder, pack, LossReadout(*targets, chunk_tokens=5)).backward()
    assert largest.num_elements <= 5_000 * 8
    with LargestTensor() as largest:
        run(decoder, pack, None)
    assert largest.num_elements == 5_000 * 25


@torch.no_grad()
def test_a_loss_without_gradients_takes_no_products_for_them(
    make_decoder, pack, targets, monkeypatch
):
    monkeypatch.setattr(Kernels, "operators", None)  # theirs go by other names

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += "mm" in func.__name__
            return func(*args, **(kwargs or {}))

    decoder = make_decoder()
    with Products() as of_logits:
        run(decoder, pack, None)
    with Products() as of_loss:
        run(decoder, pack, LossReadout(*targets))
    assert of_loss.count == of_logits.count > 0


@torch.no_grad()
def test_log_probabilities_and_last_rows_are_those_of_the_logits(make_decoder, pack, targets):
    decoder = make_decoder()
    targets_T, _ = targets
    logits_TV = run(decoder, pack, None)
    logprob_T = run(decoder, pack, LogProbReadout(targets_T, chunk_tokens=4))
    expected_T = logits_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]
    torch.testing.assert_close(logprob_T, expected_T, atol=1e-5, rtol=1e-5)
    rows_R = torch.tensor([8, 20, 24])
    torch.testing.assert_close(run(decoder, pack, LastTokenReadout(rows_R)), logits_TV[rows_R])


def test_under_autocast_the_loss_stays_near_that_of_fp32(make_decoder, pack, targets):
    decoder = make_decoder()
    exact = run(decoder, pack, LossReadout(*targets))
    with torch.autocast("cpu", torch.bfloat16):
        low = run(decoder, pack, LossReadout(*targets))
    assert low.dtype == torch.float32
    assert low.item() != exact.item()
    assert low.item() == pytest.approx(exact.item(), rel=0.02)


def test_without_bf16_multiplication_the_head_is_fp32_under_autocast_too(targets, monkeypatch):
    monkeypatch.setattr("herder.model.readout.multiplies_bf16", lambda: False)
    generator = torch.Generator().manual_seed(2)
    x_TD = torch.randn(25, 32, generator=generator, requires_grad=True)
    head = Head(32, 97)
    expected = LossReadout(*targets)(x_TD, head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = LossReadout(*targets)(x_TD, head)
    assert actual == expected
