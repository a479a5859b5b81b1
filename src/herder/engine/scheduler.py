"""Which tokens the next forward computes: prompts in chunks beside answers, in order of arrival.

Owns the order of requests and their blocks. A request without blocks waits; when a running one
finds none, the youngest gives all of its blocks back and is computed again later. So the oldest
always goes on, and every request comes to its end. Nothing here knows threads, text or tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from herder.engine.answer import Answer
from herder.engine.blocks import BlockTable, KvBlocks, block_hash

SCORED_CHUNK_TOKENS = 64
"""Prompt tokens that are scored in one forward: whole rows of logits exist for them at once."""


@dataclass(eq=False, slots=True)
class Job:
    """One request's tokens, and how far they are computed."""

    answer: Answer
    identity: bytes = b""
    """What its keys and values depend on besides token ids."""
    ids: list[int] = field(init=False)
    """The prompt's and the answer's so far."""
    num_computed: int = field(default=0, init=False)
    table: BlockTable | None = field(default=None, init=False)
    """None while it waits."""
    is_new: bool = field(default=True, init=False)
    """Whether it never ran."""
    _names: list[bytes] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.answer.request.prompt_ids)

    @property
    def held(self) -> BlockTable:
        """The blocks of a job that runs."""
        assert self.table is not None, "a job that waits has no blocks"
        return self.table

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.ids) - self.num_computed

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.answer.request.prompt_ids)

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose log-probabilities are asked for and not there yet."""
        if self.answer.request.params.prompt_logprobs is None:
            return 0
        return self.num_prompt - len(self.answer.prompt_logprobs)

    def block_names(self, num_tokens: int, block_size: int) -> Sequence[bytes]:
        """The hashes of the blocks that these tokens fill."""
        num_full = num_tokens // block_size
        for index in range(len(self._names), num_full):
            parent = self._names[-1] if self._names else block_hash(b"", (), self.identity)
            ids = self.ids[index * block_size : (index + 1) * block_size]
            self._names.append(block_hash(parent, ids))
        return self._names[:num_full]


@dataclass(frozen=True, slots=True)
class Part:
    """The next tokens of one job that a forward computes."""

    job: Job
    start: int
    """Position of the first of them."""
    num_tokens: int

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.start + self.num_tokens

    @property
    def scored(self) -> range:
        """Positions of prompt tokens that this forward scores; each needs the row before it."""
        first = self.job.num_prompt - self.job.num_unscored
        return range(max(first, self.start + 1), min(self.end + 1, self.job.num_prompt))

    @property
    def is_last(self) -> bool:
        """Whether a token can be drawn after it."""
        return self.end == len(self.job.ids)


class Scheduler:
    """The queue and the running jobs, each oldest first; all that run are older than all that wait.

    A budget smaller than the number of running answers makes the youngest of them wait a step.
    """

    def __init__(
        self,
        blocks: KvBlocks,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        caches_prefixes: bool = True,
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.caches_prefixes = caches_prefixes
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.num_preemptions = 0
        self.num_tokens_looked_up = 0
        self.num_tokens_found = 0

    def next_parts(self) -> list[Part]:
        """The next forward; those that start at 0 come last. Answers go before prompts."""
        parts: dict[Job, Part] = {}
        left, num_preemptions = self.max_num_batched_tokens, self.num_preemptions
        for job in sorted(self.running, key=lambda job: job.num_left > 1):
            part = self._part(job, left, parts) if job.table else None
            if part is None:
                continue
            while not self.blocks.grow(job.held, start=part.start, end=part.end):
                youngest = self.running[-1]
                lost = parts.pop(youngest, None)
                left += lost.num_tokens if lost else 0
                self._preempt(youngest)
                if youngest is job:
                    break
            else:
                parts[job] = part
                left -= part.num_tokens
        if num_preemptions == self.num_preemptions:
            self._admit(parts, left)
        return sorted(parts.values(), key=lambda part: part.start == 0)

    def advance(self, part: Part) -> None:
        """These tokens are computed, and their blocks may be found by others."""
        job = part.job
        job.num_computed = part.end
        if self.caches_prefixes:
            self.blocks.name(job.held, job.block_names(part.end, self.blocks.block_size))

    def remove(self, job: Job) -> None:
        """The job is over, wherever it is."""
        if job in self.waiting:
            self.waiting.remove(job)
            return
        self.running.remove(job)
        self._give_back(job)

    def _part(self, job: Job, left: int, others: dict[Job, Part]) -> Part | None:
        """The next tokens of a job, where the budget has any left."""
        count = min(job.num_left, left)
        if job.num_unscored and job.num_computed < job.num_prompt:
            scored = sum(len(part.scored) for part in others.values())
            count = min(count, SCORED_CHUNK_TOKENS - scored)
        return Part(job, job.num_computed, count) if count > 0 else None

    def _admit(self, parts: dict[Job, Part], left: int) -> None:
        while self.waiting and left and len(self.running) < self.max_num_seqs:
            job = self.waiting[0]
            job.table = self.blocks.open(self._cacheable(job))
            job.num_computed = len(job.table) * self.blocks.block_size
            part = self._part(job, left, parts)
            if (
                part is None
                or not self.blocks.has_room(job.table, len(job.ids) + 1)
                or not self.blocks.grow(job.table, start=part.start, end=part.end)
            ):
                self._give_back(job)
                return
            self.running.append(self.waiting.popleft())
            parts[job] = part
            left -= part.num_tokens
            if job.is_new and self.caches_prefixes:
                self.num_tokens_looked_up += job.num_prompt
                self.num_tokens_found += job.num_computed
            job.is_new = False

    def _cacheable(self, job: Job) -> Sequence[bytes]:
        """Blocks that need not be computed again: never the last token, whose row is to be drawn
        from, and no row that a score is read from."""
        if not self.caches_prefixes:
            return ()
        most = len(job.ids) - 1
        if job.num_unscored:
            most = job.num_prompt - job.num_unscored - 1
        return job.block_names(most, self.blocks.block_size)

    def _preempt(self, job: Job) -> None:
        self.num_preemptions += 1
        self.running.remove(job)
        self._give_back(job)
        self.waiting.appendleft(job)

    def _give_back(self, job: Job) -> None:
        self.blocks.close(job.held)
        job.table, job.num_computed = None, 0
