"""What a decode worker computes next, and who holds its blocks. Pure.

    Arrived -> waiting -> receiving -> running -> finished
                  ^  |    (pages arrive)  |  |
                  |  +-> running ---------+  |       local prefill skips `receiving`
                  +------ preempted ---------+       blocks ran out: read again later, from its own tokens
    Released ends a request in any state: the same lines free everything, idempotently.

The youngest is preempted first and the oldest never, so the oldest always finishes and nothing deadlocks. A
preempted request is read again from prompt and reply so far; a token depends on seed and position only, so the
answer does not change.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from phasor.core.config import SchedulerConfig
from phasor.core.errors import CapacityError, TransferError
from phasor.core.ids import BlockKey, RequestId
from phasor.core.request import FinishReason, Timing, Usage
from phasor.decode_worker.messages import (
    Admit,
    Arrived,
    ChunkArrived,
    EmitToken,
    Event,
    Fail,
    Instruction,
    PlacePages,
    RejectPages,
    RevokeTicket,
    TicketGrant,
    TransferBroken,
)
from phasor.engine.blocks import BlockPool
from phasor.engine.sequence import (
    Sequence,
    attach_prefix,
    blocks_spanned,
    grow_blocks,
    register_computed,
    release_blocks,
)
from phasor.engine.step import SampledTokens, ScheduledChunk, StepBudget, advance


@dataclass(slots=True)
class _Entry:
    seq: Sequence
    local: bool
    """Whether missing KV is computed here (local prefill, or reading again) rather than received."""
    arrived_s: float
    usage: Usage
    started_s: float | None = None
    first_token_s: float | None = None
    next_block: int = 0
    """While receiving: the block that the next chunk must start with."""
    ticketed: bool = False
    """Whether a ticket was issued, which the release takes back."""
    admitted: bool = False
    """Whether the router was told; a preempted request is admitted again silently."""


@dataclass(slots=True)
class DecodeScheduler:
    """Continuous batching: decode first, then prompt chunks, then admissions."""

    config: SchedulerConfig
    pool: BlockPool
    namespace: BlockKey
    eos_token_ids: frozenset[int]
    max_model_len: int
    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    tokens_transferred: int = 0
    tokens_generated: int = 0
    num_preemptions: int = 0
    _waiting: deque[_Entry] = field(default_factory=deque)
    _receiving: dict[RequestId, _Entry] = field(default_factory=dict)
    _running: dict[RequestId, _Entry] = field(default_factory=dict)
    """In order of arrival, oldest first (dicts keep insertion order; `_start` restores it)."""
    _num_arrived: int = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running) + len(self._receiving)

    @property
    def has_work(self) -> bool:
        """Whether anything is here that is not finished."""
        return bool(self._running or self._waiting or self._receiving)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take in one event."""
        if isinstance(event, Arrived):
            return self._arrive(event, now_s)
        if isinstance(event, ChunkArrived):
            return self._take_pages(event, now_s)
        if isinstance(event, TransferBroken):
            if event.request_id not in self._receiving:
                return []
            return [*self._release(event.request_id), Fail(event.request_id, event.error)]
        return self._release(event.request_id)

    def plan(self, now_s: float) -> tuple[list[ScheduledChunk], list[Instruction]]:
        """Choose the next step's chunks and admit who fits."""
        self._make_room_for_decode()
        instructions = self._admit_waiting(now_s)
        budget = StepBudget(self.config.max_step_tokens)
        decoding = [e.seq for e in self._running.values() if e.seq.num_left == 1]
        reading = [e.seq for e in self._running.values() if e.seq.num_left > 1]
        for seq in [*decoding, *reading]:
            if not budget.add(seq):
                break
        return budget.chunks, instructions

    def complete(
        self, chunks: list[ScheduledChunk], sampled: SampledTokens, now_s: float
    ) -> list[Instruction]:
        """Take in a computed step."""
        instructions: list[Instruction] = []
        for chunk, token in advance(chunks, sampled):
            entry = self._running[chunk.seq.request_id]
            start = chunk.seq.num_computed - chunk.num_tokens
            num_prompt_computed = max(0, min(chunk.seq.num_computed, chunk.seq.num_prompt) - start)
            entry.usage.decode_computed_tokens += num_prompt_computed
            self.prompt_tokens_computed += num_prompt_computed
            register_computed(chunk.seq, self.pool)
            if token is not None:
                instructions.extend(self._emit(entry, token, now_s))
        return instructions

    def _arrive(self, event: Arrived, now_s: float) -> list[Instruction]:
        num_tokens = len(event.token_ids) + event.sampling.max_tokens - 1
        num_blocks = -(-num_tokens // self.pool.block_tokens)
        if num_blocks > self.pool.num_blocks:
            message = (
                f"{len(event.token_ids)} prompt + {event.sampling.max_tokens} new tokens take {num_blocks} blocks, "
                f"this decode worker has {self.pool.num_blocks}; raise --kv-memory or lower max_tokens"
            )
            return [Fail(event.request_id, CapacityError(message, ever=True))]
        if len(self._waiting) >= self.config.max_waiting:
            message = (
                f"this decode worker's queue is full: {len(self._waiting)} requests wait and max_waiting is "
                f"{self.config.max_waiting}; try again later, or raise --max-waiting"
            )
            return [Fail(event.request_id, CapacityError(message))]
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
        usage = Usage(prompt_tokens=seq.num_prompt)
        self._waiting.append(_Entry(seq, event.local_prefill, now_s, usage))
        return []

    def _make_room_for_decode(self) -> None:
        """Give each decoding sequence, oldest first, a place for its next position; preempt from the young end."""
        for entry in list(self._running.values()):
            while entry.seq.request_id in self._running and entry.seq.num_left == 1:
                if grow_blocks(entry.seq, entry.seq.num_tokens, self.pool):
                    break
                youngest = next(reversed(self._running.values()))
                self._preempt(youngest)

    def _preempt(self, entry: _Entry) -> None:
        del self._running[entry.seq.request_id]
        release_blocks(entry.seq, self.pool)
        entry.local = True
        entry.usage.num_preemptions += 1
        self.num_preemptions += 1
        # In order of arrival: an older one may wait already, preempted while the rest was still receiving.
        num_older = sum(waiting.seq.arrival < entry.seq.arrival for waiting in self._waiting)
        self._waiting.insert(num_older, entry)

    def _admit_waiting(self, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        while self._waiting and self.num_running < self.config.max_running:
            entry = self._waiting[0]
            attach_prefix(entry.seq, self.pool)
            missing = entry.seq.num_blocks_missing(entry.seq.num_tokens, self.pool.block_tokens)
            # One block in hand per running sequence: without it, an admission would be preempted right away.
            if missing + len(self._running) > self.pool.num_free and self.num_running > 0:
                release_blocks(entry.seq, self.pool)
                break
            if not grow_blocks(entry.seq, entry.seq.num_tokens, self.pool):
                release_blocks(entry.seq, self.pool)
                break
            self._waiting.popleft()
            instructions.extend(self._admit(entry, now_s))
        return instructions

    def _admit(self, entry: _Entry, now_s: float) -> list[Instruction]:
        seq = entry.seq
        first_time, entry.admitted = not entry.admitted, True
        if first_time:
            entry.started_s = now_s
            self.prompt_tokens_reused += seq.num_cached
            if entry.local:
                entry.usage.cached_tokens = seq.num_cached
        if entry.local:
            self._start(entry)
            return [Admit(seq.request_id, seq.num_cached, None)] if first_time else []
        entry.next_block = seq.num_cached // self.pool.block_tokens
        entry.ticketed = True
        self._receiving[seq.request_id] = entry
        grant = TicketGrant(entry.next_block, len(seq.blocks) - entry.next_block)
        return [Admit(seq.request_id, seq.num_cached, grant)]

    def _start(self, entry: _Entry) -> None:
        """Put an entry among the running ones, keeping them in order of arrival."""
        self._running[entry.seq.request_id] = entry
        ordered = sorted(self._running.items(), key=lambda item: item[1].seq.arrival)
        self._running.clear()
        self._running.update(ordered)

    def _take_pages(self, event: ChunkArrived, now_s: float) -> list[Instruction]:
        entry = self._receiving.get(event.request_id)
        if entry is None:
            return [RejectPages(event.acknowledge, "the request has ended here")]
        seq, end = entry.seq, event.first_block + event.num_blocks
        complete = end == len(seq.blocks)
        if (event.num_blocks and event.first_block != entry.next_block) or end > len(seq.blocks):
            return self._reject(event, f"expected blocks from {entry.next_block} of {len(seq.blocks)}")
        if event.first_token is not None and (not complete or event.num_tokens != seq.num_prompt):
            return self._reject(event, f"last chunk ends at block {end} of {len(seq.blocks)}")
        entry.next_block = end
        blocks = blocks_spanned(seq.blocks, event.first_block, event.num_blocks)
        instructions: list[Instruction] = [PlacePages(blocks, event.pages, event.acknowledge)]
        if event.first_token is None:
            return instructions
        num_tokens = seq.num_prompt - seq.num_computed
        entry.usage.transferred_tokens = num_tokens
        self.tokens_transferred += num_tokens
        seq.num_computed = seq.num_prompt
        register_computed(seq, self.pool)
        del self._receiving[seq.request_id]
        self._start(entry)
        seq.token_ids.append(event.first_token)
        return [*instructions, *self._emit(entry, event.first_token, now_s)]

    def _reject(self, event: ChunkArrived, why: str) -> list[Instruction]:
        message = f"pages of blocks {event.first_block}+{event.num_blocks} do not fit: {why}"
        error = TransferError(message)
        return [
            RejectPages(event.acknowledge, message),
            *self._release(event.request_id),
            Fail(event.request_id, error),
        ]

    def _emit(self, entry: _Entry, token: int, now_s: float) -> list[Instruction]:
        """Report the token just appended to `entry`; a finished request is released here."""
        seq = entry.seq
        self.tokens_generated += 1
        entry.usage.completion_tokens = seq.num_generated
        if entry.first_token_s is None:
            entry.first_token_s = now_s
        reason = self._finish_reason(seq, token)
        emitted = EmitToken(seq.request_id, token, reason, replace(entry.usage), self._timing(entry))
        return [emitted, *(self._release(seq.request_id) if reason is not None else [])]

    def _timing(self, entry: _Entry) -> Timing:
        if entry.usage.transferred_tokens or entry.started_s is None or entry.first_token_s is None:
            return Timing()
        return Timing(
            queue_s=entry.started_s - entry.arrived_s, prefill_s=entry.first_token_s - entry.started_s
        )

    def _finish_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        if token in seq.sampling.stop_token_ids:
            return FinishReason.STOP
        if token in self.eos_token_ids and not seq.sampling.ignore_eos:
            return FinishReason.STOP
        if seq.num_generated >= seq.sampling.max_tokens or seq.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _release(self, request_id: RequestId) -> list[Instruction]:
        """The one release path: free blocks and ticket of a request in any state; unknown ones are ignored."""
        entry = self._running.pop(request_id, None) or self._receiving.pop(request_id, None)
        if entry is None:
            entry = next((w for w in self._waiting if w.seq.request_id == request_id), None)
            if entry is None:
                return []
            self._waiting.remove(entry)
        release_blocks(entry.seq, self.pool)
        return [RevokeTicket(request_id)] if entry.ticketed else []
