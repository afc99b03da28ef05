"""Which prompt chunks a prefill worker computes next, and who holds its blocks. Pure.

    Arrived -> waiting -> reading -> handed over -> Released
                  |          |           |
                  +----------+-----------+--> Released (cancel, error, deadline): the same event, idempotent

Events go in with `handle`, a step is planned with `plan` and reported with `complete`; instructions come out.
No IO, no clock (callers pass `now_s`), no tensors.
"""

from collections import deque
from dataclasses import dataclass, field

from phasor.core.config import SchedulerConfig
from phasor.core.errors import CapacityError, PhasorError
from phasor.core.ids import BlockId, BlockKey, RequestId
from phasor.core.request import SampledToken, SamplingParams, TokenLogprobs
from phasor.engine.blocks import BlockPool
from phasor.engine.sequence import (
    Sequence,
    attach_prefix,
    blocks_spanned,
    grow_blocks,
    register_computed,
    release_blocks,
)
from phasor.engine.step import ChunkResult, ScheduledChunk, StepBudget, advance


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A prompt to read for the holder of a ticket."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    tier: float
    first_block: int
    """Blocks before this one are held by the decode worker already and are not sent."""


@dataclass(frozen=True, slots=True)
class Released:
    """The request needs nothing here any more, whatever the reason. Unknown requests are ignored."""

    request_id: RequestId


Event = Arrived | Released


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStats:
    """What reading one prompt took."""

    cached_tokens: int
    computed_tokens: int
    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPages:
    """Send these blocks; they stay untouched until the request is released."""

    request_id: RequestId
    first_block: int
    blocks: list[BlockId]
    first_tokens: tuple[SampledToken, ...] = ()
    """On the last chunk: one per reply."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """On the last chunk, if asked for: of the prompt's tokens but the first."""
    stats: PrefillStats | None = None
    """Set on the last chunk."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request can not be served here."""

    request_id: RequestId
    error: PhasorError


Instruction = PushPages | Refuse


@dataclass(slots=True)
class _Reading:
    seq: Sequence
    first_block: int
    arrived_s: float
    next_push: int = 0
    started_s: float = 0.0
    num_cached: int = 0


@dataclass(slots=True)
class PrefillScheduler:
    """First come, first served over a token budget; a prompt's blocks are all taken when it starts."""

    config: SchedulerConfig
    pool: BlockPool
    namespace: BlockKey
    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    _waiting: deque[_Reading] = field(default_factory=deque)
    _reading: list[_Reading] = field(default_factory=list)
    _handed_over: dict[RequestId, _Reading] = field(default_factory=dict)
    _num_arrived: int = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._reading) + len(self._handed_over)

    @property
    def has_work(self) -> bool:
        """Whether `plan` may schedule something."""
        return bool(self._reading or self._waiting)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take in one event."""
        if isinstance(event, Released):
            self._release(event.request_id)
            return []
        error = self._refusal(event)
        if error is not None:
            return [Refuse(event.request_id, error)]
        self._num_arrived += 1
        seq = Sequence(
            request_id=event.request_id,
            token_ids=list(event.token_ids),
            num_prompt=len(event.token_ids),
            sampling=event.sampling,
            tier=event.tier,
            arrival=self._num_arrived,
            namespace=self.namespace,
        )
        self._waiting.append(_Reading(seq, event.first_block, now_s, next_push=event.first_block))
        return []

    def plan(self, now_s: float) -> tuple[list[ScheduledChunk], list[Instruction]]:
        """Choose the next step's chunks. Prompts that start may bring cached pages to push at once."""
        instructions = self._start_waiting(now_s)
        budget = StepBudget(self.config.max_step_tokens)
        for reading in self._reading:
            if not budget.add(reading.seq):
                break
        return budget.chunks, instructions

    def complete(
        self, chunks: list[ScheduledChunk], results: list[ChunkResult], now_s: float
    ) -> list[Instruction]:
        """Take in a computed step: whole blocks become findable and are pushed."""
        instructions: list[Instruction] = []
        by_id = {reading.seq.request_id: reading for reading in self._reading}
        for chunk, result in advance(chunks, results):
            reading = by_id[chunk.seq.request_id]
            self.prompt_tokens_computed += chunk.num_tokens
            register_computed(reading.seq, self.pool)
            if not result.tokens:
                instructions.extend(self._push(reading))
                continue
            self._reading.remove(reading)
            self._handed_over[reading.seq.request_id] = reading
            instructions.extend(self._push(reading, result.tokens, now_s))
        return instructions

    def _refusal(self, event: Arrived) -> PhasorError | None:
        num_blocks = -(-len(event.token_ids) // self.pool.block_tokens)
        if num_blocks > self.pool.num_blocks:
            return CapacityError(
                f"a prompt of {len(event.token_ids)} tokens takes {num_blocks} blocks, this prefill worker has "
                f"{self.pool.num_blocks}; raise --kv-memory or shorten the prompt",
                ever=True,
            )
        if len(self._waiting) >= self.config.max_waiting:
            return CapacityError(
                f"this prefill worker's queue is full: {len(self._waiting)} prompts wait and max_waiting is "
                f"{self.config.max_waiting}; try again later, or raise --max-waiting"
            )
        return None

    def _start_waiting(self, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        while self._waiting and self.num_running < self.config.max_running:
            reading = self._waiting[0]
            attach_prefix(reading.seq, self.pool)
            if not grow_blocks(reading.seq, reading.seq.num_tokens, self.pool):
                release_blocks(reading.seq, self.pool)
                break
            self._waiting.popleft()
            reading.started_s = now_s
            reading.num_cached = reading.seq.num_cached
            self.prompt_tokens_reused += reading.num_cached
            self._reading.append(reading)
            instructions.extend(self._push(reading))
        return instructions

    def _push(
        self, reading: _Reading, tokens: tuple[SampledToken, ...] = (), now_s: float = 0.0
    ) -> list[Instruction]:
        """Push blocks that became whole; with the first tokens, the partial last block too."""
        seq = reading.seq
        end = len(seq.blocks) if tokens else seq.num_computed // self.pool.block_tokens
        count = max(0, end - reading.next_push)
        if count == 0 and not tokens:
            return []
        push = PushPages(
            request_id=seq.request_id,
            first_block=reading.next_push,
            blocks=blocks_spanned(seq.blocks, reading.next_push, count),
            first_tokens=tokens,
            prompt_logprobs=tuple(seq.prompt_logprobs) if tokens else (),
            stats=self._stats(reading, now_s) if tokens else None,
        )
        reading.next_push += count
        return [push]

    def _stats(self, reading: _Reading, now_s: float) -> PrefillStats:
        return PrefillStats(
            cached_tokens=reading.num_cached,
            computed_tokens=reading.seq.num_prompt - reading.num_cached,
            queue_s=reading.started_s - reading.arrived_s,
            prefill_s=now_s - reading.started_s,
        )

    def _release(self, request_id: RequestId) -> None:
        handed_over = self._handed_over.pop(request_id, None)
        if handed_over is not None:
            release_blocks(handed_over.seq, self.pool)
            return
        for reading in self._reading:
            if reading.seq.request_id == request_id:
                self._reading.remove(reading)
                release_blocks(reading.seq, self.pool)
                return
        for reading in self._waiting:
            if reading.seq.request_id == request_id:
                self._waiting.remove(reading)
                return
