"""The choice of one token from one row of logits: pure functions in fp32, and a row's own state.

Shape legend: V tokens with a name in the tokenizer (padding rows of the head are cut off before
anything is drawn), W the head's whole width, C the candidates that filters leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from herder.engine.request import Logprob, SamplingParams, TokenConstraint, TokenLogprobs
from herder.errors import ModelError, RequestError

GREEDY_TEMPERATURE = 1e-3
"""Below it the likeliest token is taken: logits 0.02 apart are already e^20 apart in odds."""
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write. Source: vLLM's value."""
_FIRST_CANDIDATES = 1024
"""top_p looks here first: sorting a whole vocabulary costs a tenth of a small model's step."""


def penalized(logits_V: Tensor, params: SamplingParams, counts_V: Tensor, seen_V: Tensor) -> Tensor:
    """Logits with penalties: `counts_V` of the answer, `seen_V` whether in prompt or answer.

    Source: CTRL, arXiv:1909.05858, section 4.1 (repetition); OpenAI API reference (presence and
    frequency: logit - count * frequency - (count > 0) * presence).
    """
    repetition = params.repetition_penalty
    if repetition != 1:
        weighed_V = torch.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
        logits_V = torch.where(seen_V, weighed_V, logits_V)
    return logits_V - counts_V * params.frequency_penalty - (counts_V > 0) * params.presence_penalty


def warmed(logits_V: Tensor, temperature: float) -> Tensor:
    """Logits less their maximum, over the temperature: no overflow at any temperature."""
    return (logits_V - logits_V.max()) / temperature


def candidates(
    logits_V: Tensor, *, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor | None]:
    """Logits and ids of the tokens that the filters leave, at least one; ids None: all of them.

    top_p acts on what top_k and min_p left. Source: arXiv:1904.09751 (top_p), arXiv:2407.01082.
    """
    num_tokens = logits_V.numel()
    if min_p > 0:
        too_unlikely_V = logits_V < logits_V.max() + math.log(min_p)
        logits_V = logits_V.masked_fill(too_unlikely_V, -math.inf)
    ids_C: Tensor | None = None
    if 0 < top_k < num_tokens:
        logits_V, ids_C = logits_V.topk(top_k)
    if top_p < 1:
        total = logits_V.logsumexp(0)
        if ids_C is None:
            logits_V, ids_C = _likeliest(logits_V, total, top_p)
        probabilities_C = (logits_V - total).exp()
        before_C = probabilities_C.cumsum(0) - probabilities_C
        outside_C = before_C >= top_p
        outside_C[0] = False
        logits_V = logits_V.masked_fill(outside_C, -math.inf)
    return logits_V, ids_C


def _likeliest(logits_V: Tensor, total: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, best first, at least `top_p` together. `total`: logsumexp of all."""
    if logits_V.numel() > _FIRST_CANDIDATES:
        logits_C, ids_C = logits_V.topk(_FIRST_CANDIDATES)
        if (logits_C.logsumexp(0) - total).exp().item() > top_p:
            return logits_C, ids_C
    logits_C, ids_C = logits_V.sort(descending=True)
    return logits_C, ids_C


def drawn(logits_C: Tensor, generator: torch.Generator) -> Tensor:
    """The index of one token drawn from softmax(logits), as a tensor: nothing waits for it here.

    The largest of p_i / e_i with e_i exponential is i with probability p_i (Gumbel's trick).
    """
    exponential_C = torch.empty_like(logits_C).exponential_(generator=generator)
    return (logits_C.softmax(0) / exponential_C).argmax()


def logprobs_of(logits_W: Tensor, token_id: int, *, num_tokens: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities over the whole width, as training computes them."""
    logprobs_W = logits_W.log_softmax(0)
    values_C, ids_C = logprobs_W[:num_tokens].topk(min(num_top, num_tokens))
    chosen = Logprob(token_id, _finite(logprobs_W[token_id].item()))
    pairs = zip(ids_C.tolist(), values_C.tolist(), strict=True)
    return TokenLogprobs(chosen, tuple(Logprob(name, _finite(value)) for name, value in pairs))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


class TokenSampler:
    """One request's state: its generator, its counts for penalties, its bias and hidden tokens."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        num_tokens: int,
        end_ids: Sequence[int],
        device: torch.device,
        constraint: TokenConstraint | None = None,
    ) -> None:
        """`end_ids` are the tokens that would end the answer: hidden for params.min_tokens, unless
        `constraint` allows nothing else."""

        def named(token_ids: Iterable[int]) -> Tensor:
            inside = [token_id for token_id in token_ids if token_id < num_tokens]
            return torch.tensor(inside, dtype=torch.int64, device=device)

        self._params = params
        self._constraint = constraint
        self.is_over = False
        """Whether the token chosen last is the constraint's end."""
        self._num_tokens = num_tokens
        self._num_made = 0
        self._generator = torch.Generator(device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._ends_E = named(end_ids)
        self._ends_on_host = self._ends_E.tolist()
        self._bias_V: Tensor | None = None
        if params.logit_bias:
            self._bias_V = torch.zeros(num_tokens, device=device)
            for token_id in named(params.logit_bias).tolist():
                self._bias_V[token_id] = params.logit_bias[token_id]
        self._is_penalized = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        )
        counted = num_tokens if self._is_penalized else 0  # the many that wait take no memory
        self._counts_V = torch.zeros(counted, device=device)
        self._seen_V = torch.zeros(counted, dtype=torch.bool, device=device)
        if self._is_penalized:
            self._seen_V[named(prompt_ids)] = True

    @property
    def takes_likeliest(self) -> bool:
        """Whether `choose` would give the largest of the logits as they are."""
        return (
            self._params.temperature < GREEDY_TEMPERATURE
            and not self._is_penalized
            and self._bias_V is None
            and self._constraint is None
            and not self._hides_ends
        )

    @property
    def _hides_ends(self) -> bool:
        return self._num_made < self._params.min_tokens and len(self._ends_E) > 0

    def choose(self, logits_W: Tensor) -> int:
        """The next token. `logits_W` is fp32.

        Raises ModelError where none can be drawn, RequestError where the constraint allows none.
        """
        logits_V = self._shaped(logits_W[: self._num_tokens])
        peak, chosen = logits_V.max(0)
        if self._params.temperature >= GREEDY_TEMPERATURE:
            chosen = self._drawn(logits_V)
        # One wait for the device a token: value and index together, exact in fp64.
        best, token = torch.stack((peak.double(), chosen.double())).tolist()
        return self.accept(best, int(token))

    def accept(self, best: float, token_id: int) -> int:
        """Count a token that was chosen; `best` is the largest logit. Raises as `choose` does."""
        if not math.isfinite(best):
            raise ModelError(
                f"the best logit is {best}: no token can be drawn. The weights are damaged, or "
                "their products overflow in this precision: fp16 has the narrowest range."
            )
        self._num_made += 1
        if self._constraint is not None:
            self.is_over = self._constraint.accept(token_id)
        if self._is_penalized:
            self._counts_V[token_id] += 1
            self._seen_V[token_id] = True
        return token_id

    def _shaped(self, logits_V: Tensor) -> Tensor:
        """Penalties, then bias, then what may not come, or not yet."""
        if self._is_penalized:
            logits_V = penalized(logits_V, self._params, self._counts_V, self._seen_V)
        if self._bias_V is not None:
            logits_V = logits_V + self._bias_V
        hides_ends = self._hides_ends
        if self._constraint is not None:
            allowed_V = self._allowed(self._constraint, hides_ends=hides_ends)
            return logits_V.masked_fill(~allowed_V, -math.inf)
        return logits_V.index_fill(0, self._ends_E, -math.inf) if hides_ends else logits_V

    def _allowed(self, constraint: TokenConstraint, *, hides_ends: bool) -> Tensor:
        """What the constraint allows, at least one token: its end wins over min_tokens.

        Made on the host, where nothing waits for the device.
        """
        bits = np.frombuffer(constraint.allowed(), dtype=np.uint8)
        flags = np.unpackbits(bits, count=self._num_tokens, bitorder="little").astype(bool)
        if not flags.any():
            raise RequestError(
                "no token of this model goes on with the grammar that it must follow"
            )
        if hides_ends:
            unended = flags.copy()
            unended[self._ends_on_host] = False
            flags = unended if unended.any() else flags
        return torch.from_numpy(flags).to(self._ends_E.device)

    def _drawn(self, logits_V: Tensor) -> Tensor:
        params = self._params
        logits_C, ids_C = candidates(
            warmed(logits_V, params.temperature),
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        index = drawn(logits_C, self._generator)
        return index if ids_C is None else ids_C[index]
