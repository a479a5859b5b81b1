"""One forward over parts of many requests, and a token for each that is ready for one.

The model is the training model itself, and is left as it was found. Nothing here knows threads,
queues or HTTP: what is computed next is the scheduler's choice.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from herder.config.run import EngineConfig
from herder.engine.answer import Answer
from herder.engine.blocks import KvBlocks
from herder.engine.capacity import block_groups
from herder.engine.request import (
    Event,
    Limits,
    PromptScored,
    Request,
    TokenLogprobs,
    check_request,
)
from herder.engine.sampler import TokenSampler, logprobs_of
from herder.engine.scheduler import Job, Part
from herder.model.decoder import Decoder
from herder.model.paged import KvPages, PagedAttend, Span
from herder.model.readout import LastTokenReadout

_BATCHED_TOKENS = {"cpu": 512, "cuda": 4096}


class Runner:
    """One model and its key-value cache."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        window_tokens: int,
        eos_token_ids: Iterable[int],
        num_named_tokens: int | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        """`num_named_tokens`: ids the tokenizer has; the head's padding rows past it are never
        drawn. None: all of them. Raises ConfigError where the cache holds no whole window."""
        weight = next(decoder.parameters())
        architecture, device = decoder.config, weight.device
        self.config = config = config or EngineConfig()
        self.max_num_batched_tokens = config.max_num_batched_tokens or _BATCHED_TOKENS[device.type]
        self.decoder = decoder
        self.device = device
        self.limits = Limits(window_tokens, architecture.vocab_size)
        self.eos_token_ids = frozenset(eos_token_ids)
        self._groups = block_groups(
            architecture,
            config,
            window_tokens=window_tokens,
            max_num_batched_tokens=self.max_num_batched_tokens,
            bytes_per_element=weight.dtype.itemsize,
            device=device,
        )
        self.pages = KvPages(
            architecture,
            num_blocks=[group.num_blocks for group in self._groups],
            block_size=config.block_size,
            dtype=weight.dtype,
            device=device,
        )
        width = architecture.vocab_size
        self._num_named_tokens = min(num_named_tokens or width, width)

    def blocks(self) -> KvBlocks:
        """The books of all blocks, free."""
        return KvBlocks(self._groups, block_size=self.config.block_size)

    @contextmanager
    def serving(self) -> Generator[None]:
        """The model in evaluation mode inside, every module as it was after."""
        training = [module for module in self.decoder.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def begin(self, request: Request) -> Job:
        """What becomes of a request. Raises RequestError where it does not fit."""
        check_request(request, self.limits)
        params = request.params
        end_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_ids |= self.eos_token_ids
        sampler = TokenSampler(
            params,
            request.prompt_ids,
            num_tokens=self._num_named_tokens,
            end_ids=sorted(end_ids),
            device=self.device,
            constraint=request.constraint,
        )
        longest = self.limits.longest_answer(request)
        answer = Answer(request, sampler, end_ids=end_ids, longest=longest)
        return Job(answer, identity=self._identity(request))

    def _identity(self, request: Request) -> bytes:
        """What a request's keys and values depend on besides token ids: its salt, the weights as
        they are now, and where rotations depend on a text's length (dynamic and longrope scaling)
        the prompt's."""
        num_prompt = len(request.prompt_ids)
        is_length_read = any(r.depends_on_context(num_prompt) for r in self.decoder.ropes)
        num_updates = sum(weight._version for weight in self.decoder.parameters())
        return repr(
            (request.cache_salt, num_updates, num_prompt if is_length_read else None)
        ).encode()

    @torch.inference_mode()
    def step(self, parts: Sequence[Part]) -> list[list[Event]]:
        """One forward over all parts, and the events that each brings; jobs hold what was drawn.

        A request that fails by itself gets its Finished event; where the forward fails, it raises.
        """
        rows: list[int] = []
        ends: list[int] = []
        first = 0
        for part in parts:
            rows += [first + position - 1 - part.start for position in part.scored]
            rows += [first + part.num_tokens - 1] if part.is_last else []
            ends.append(len(rows))
            first += part.num_tokens
        with self.serving():
            logits_RW = self._forward(parts, rows).float()
        likeliest = self._likeliest(logits_RW)
        events: list[list[Event]] = []
        for part, begin, end in zip(parts, [0, *ends], ends, strict=False):
            answer = part.job.answer
            try:
                events.append(self._events(part, logits_RW[begin:end], likeliest[end - 1]))
            except Exception as error:  # whatever it is, it is told to whoever asked
                events.append([answer.failed("error", error)])
        return events

    def _forward(self, parts: Sequence[Part], rows: list[int]) -> Tensor:
        spans = [
            Span(part.start, part.num_tokens, part.job.num_prompt, part.job.held.blocks)
            for part in parts
        ]
        attend = PagedAttend(self.pages, spans)
        ids = [token_id for part in parts for token_id in part.job.ids[part.start : part.end]]
        return self.decoder(
            torch.tensor(ids, device=self.device),
            positions_T=attend.positions_T,
            attend=attend,
            readout=LastTokenReadout(torch.tensor(rows, dtype=torch.int64, device=self.device)),
        )

    def _likeliest(self, logits_RW: Tensor) -> list[tuple[float, int]]:
        """Of each row the largest logit and its token: one wait for the device."""
        if not len(logits_RW):
            return [(0.0, 0)]
        peak_R, token_R = logits_RW[:, : self._num_named_tokens].max(1)
        return list(zip(peak_R.tolist(), token_R.tolist(), strict=True))

    def _events(self, part: Part, logits_RW: Tensor, likeliest: tuple[float, int]) -> list[Event]:
        """Scores, then where the part is the last one a token, and what it did to the text."""
        job, answer = part.job, part.job.answer
        params, is_last = answer.request.params, part.is_last
        for logits_W, position in zip(logits_RW, part.scored, strict=False):
            scored = self._logprobs(logits_W, job.ids[position], params.prompt_logprobs)
            answer.prompt_logprobs.append(scored)
        if not is_last:
            return []
        events: list[Event] = []
        if params.prompt_logprobs is not None and not answer.num_made:
            events.append(PromptScored(tuple(answer.prompt_logprobs)))
        if params.max_tokens == 0:
            return [*events, answer.finished()]
        logits_W, sampler = logits_RW[-1], answer.sampler
        token_id = (
            sampler.accept(*likeliest) if sampler.takes_likeliest else sampler.choose(logits_W)
        )
        job.ids.append(token_id)
        return events + answer.take(token_id, self._logprobs(logits_W, token_id, params.logprobs))

    def _logprobs(
        self, logits_W: Tensor, token_id: int, num_top: int | None
    ) -> TokenLogprobs | None:
        if num_top is None:
            return None
        return logprobs_of(logits_W, token_id, num_tokens=self._num_named_tokens, num_top=num_top)
