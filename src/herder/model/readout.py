"""What leaves the decoder: last rows for sampling, a fused loss for training, log-probabilities.

Legend: T packed tokens, D hidden, V vocabulary, C tokens of one chunk. Logits of all tokens never
exist at once: with a vocabulary of 128,000 they would outweigh a layer's activations many times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from herder.model.autograd import Function
from herder.model.linear import Linear, multiplies_bf16, product_dtype


class Head(Linear):
    """Logits, capped where the config says so: cap * tanh(logits / cap). Source: Gemma 2,
    arXiv:2408.00118, section 2. A readout that multiplies by the weight itself must cap too."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        softcap: float | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        made = {"bias": False, "device": device, "dtype": dtype}
        super().__init__(hidden_size, vocab_size, axes=("vocab", "embed"), **made)
        self.softcap = softcap

    def forward(self, input: Tensor, readout: Readout | None = None) -> Any:
        """[T, D] to logits_TV, or to what `readout` makes of it and the head: called from here, so
        that whatever shards the head's weight has it whole by then."""
        if readout is not None:
            return readout(input, self)
        return self.logits(input)

    def logits(self, x_TD: Tensor) -> Tensor:
        """logits_TV, capped."""
        logits_TV = super().forward(x_TD)
        if self.softcap is None:
            return logits_TV
        return torch.tanh(logits_TV / self.softcap) * self.softcap


Readout = Callable[[Tensor, Head], Any]
"""(x_TD, head) -> what leaves the model."""


class LastTokenReadout:
    """logits_RV of chosen rows only: prefill pays for one row of the head and not for T."""

    def __init__(self, rows_R: Tensor) -> None:
        self.rows_R = rows_R

    def __call__(self, x_TD: Tensor, head: Head) -> Tensor:
        return head.logits(x_TD[self.rows_R])


class LogProbReadout:
    """logprob_T in fp32 of each token's target, without gradients."""

    def __init__(self, targets_T: Tensor, *, chunk_tokens: int = 512) -> None:
        self.targets_T = targets_T
        self.chunk_tokens = chunk_tokens

    @torch.no_grad()
    def __call__(self, x_TD: Tensor, head: Head) -> Tensor:
        parts = []
        for rows in _chunks(x_TD.shape[0], self.chunk_tokens):
            logprob_CV = head.logits(x_TD[rows]).float().log_softmax(-1)
            parts.append(logprob_CV.gather(1, self.targets_T[rows, None])[:, 0])
        return torch.cat(parts)


class Vocabulary:
    """Which entries of the vocabulary the head's weight holds here: all, in one process.

    A subclass that holds a slice of them sums and compares over all slices.
    """

    first: int = 0
    """The entry of the weight's first row."""

    def largest(self, x_C1: Tensor) -> Tensor:
        """The maximum over all slices, in place."""
        return x_C1

    def total(self, x: Tensor) -> Tensor:
        """The sum over all slices, in place."""
        return x


WHOLE_VOCABULARY = Vocabulary()


class LossReadout:
    """Cross-entropy summed over tokens, each times its weight: a scalar in fp32.

    Divide by the weights of all micro-batches and ranks, not of this one. Gradients of a chunk are
    formed in the forward pass while its logits exist, so the head's product is never recomputed.
    """

    def __init__(
        self,
        targets_T: Tensor,
        weights_T: Tensor,
        *,
        chunk_tokens: int = 512,
        vocabulary: Vocabulary = WHOLE_VOCABULARY,
    ) -> None:
        self.targets_T = targets_T
        self.weights_T = weights_T
        self.chunk_tokens = chunk_tokens
        self.vocabulary = vocabulary

    def __call__(self, x_TD: Tensor, head: Head) -> Tensor:
        dtype = product_dtype(x_TD)
        if dtype == torch.bfloat16 and x_TD.device.type == "cpu" and not multiplies_bf16():
            dtype = torch.float32
        weight_VD = head.weight
        if not torch.is_grad_enabled():  # which a Function does not see: it asks its arguments
            x_TD, weight_VD = x_TD.detach(), weight_VD.detach()
        # Autocast would take the products in its own dtype again, whatever was chosen above.
        with torch.autocast(x_TD.device.type, enabled=False):
            return _ChunkedCrossEntropy.apply(
                x_TD,
                weight_VD,
                self.targets_T,
                self.weights_T,
                self.chunk_tokens,
                dtype,
                head.softcap,
                self.vocabulary,
            )


class _ChunkedCrossEntropy(Function):
    """sum_t w_t * (logsumexp(l_t) - l_t[target_t]) of logits l_t = x_t W^T, capped or not, chunk by
    chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        weights_T: Tensor,
        chunk_tokens: int,
        dtype: torch.dtype,
        softcap: float | None,
        vocabulary: Vocabulary,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x_grad_TD = torch.empty_like(x_TD) if needs_x else None
        weight_grad_VD = torch.zeros_like(weight_VD) if needs_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=x_TD.device)
        low_weight_VD = weight_VD.to(dtype)
        for rows in _chunks(x_TD.shape[0], chunk_tokens):
            x_CD = x_TD[rows].to(dtype)
            part, logits_grad_CV = _loss_and_gradient(
                x_CD @ low_weight_VD.t(),
                targets_T[rows, None] - vocabulary.first,
                weights_T[rows, None],
                softcap,
                vocabulary,
            )
            loss += part
            if x_grad_TD is not None:
                x_grad_TD[rows] = (logits_grad_CV @ low_weight_VD).to(x_TD.dtype)
            if weight_grad_VD is not None:
                _add_product(weight_grad_VD, logits_grad_CV.t(), x_CD)
            del logits_grad_CV  # before the next chunk's logits
        ctx.save_for_backward(x_grad_TD, weight_grad_VD)
        ctx.is_scaled = False
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled where they are: a copy would be of the largest weight's size. A pipeline that takes
        # the gradients of inputs and of weights apart calls this twice with the same gradient.
        grads = ctx.saved_tensors
        if not ctx.is_scaled:
            for each in grads:
                if each is not None:
                    each.data.mul_(grad)  # what is saved may not change, as autograd counts it
            ctx.is_scaled = True
        return *grads, *[None] * 6


def _loss_and_gradient(
    logits_CV: Tensor,
    targets_C1: Tensor,
    weights_C1: Tensor,
    softcap: float | None,
    vocabulary: Vocabulary,
) -> tuple[Tensor, Tensor]:
    """The chunk's weighted loss in fp32, and its gradient at the logits in their dtype.

    softmax is formed in place: a second [C, V] tensor would be the step's largest. Targets count
    from this slice's first entry; those of other slices are outside.
    """
    dtype, logits_CV = logits_CV.dtype, logits_CV.float()
    tanh_CV = None
    if softcap is not None:
        tanh_CV = (logits_CV / softcap).tanh_()
        logits_CV = tanh_CV * softcap
    logits_CV -= vocabulary.largest(logits_CV.amax(-1, keepdim=True))
    is_here_C1 = (targets_C1 >= 0) & (targets_C1 < logits_CV.shape[1])
    targets_C1 = targets_C1.where(is_here_C1, 0)
    chosen_C1 = vocabulary.total(logits_CV.gather(1, targets_C1).where(is_here_C1, 0))
    odds_CV = logits_CV.exp_()
    total_C1 = vocabulary.total(odds_CV.sum(-1, keepdim=True))
    loss = ((total_C1.log() - chosen_C1) * weights_C1).sum()
    gradient_CV = odds_CV.mul_(weights_C1 / total_C1)
    gradient_CV.scatter_add_(1, targets_C1, -weights_C1 * is_here_C1)
    if tanh_CV is not None:
        gradient_CV.mul_(tanh_CV.square_().neg_().add_(1))
    return loss, gradient_CV.to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed over chunks in total's own precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))
