"""What a decode worker computes next, and who holds its blocks. Pure.

    Arrived -> waiting -> receiving -> running -> finished
                  ^  |    (pages arrive)  |  |
                  |  +-> running ---------+  |       local prefill skips `receiving`
                  +------ preempted ---------+       blocks ran out: read again later, from its own tokens
    Released ends a request in any state: the same lines free everything, idempotently.

A request for several replies is one sequence until its prompt is read, and is then forked: the replies share the
prompt's whole blocks, and each has its own copy of a partial last one (reserved at admission, so that all replies
are admitted or none).

The youngest is preempted first and the oldest never, so the oldest always finishes and nothing deadlocks. A
preempted sequence is read again from prompt and reply so far; a token depends on seed and position only, so the
answer does not change.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from phasor.core.config import SchedulerConfig
from phasor.core.errors import CapacityError, TransferError
from phasor.core.ids import BlockId, BlockKey, RequestId
from phasor.core.request import FinishReason, SampledToken, SamplingParams, Timing, Usage
from phasor.decode_worker.messages import (
    Admit,
    Arrived,
    ChunkArrived,
    CopyBlock,
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
    fork_sequence,
    grow_blocks,
    register_computed,
    release_blocks,
)
from phasor.engine.step import ChunkResult, ScheduledChunk, StepBudget, advance


@dataclass(slots=True, kw_only=True)
class _Request:
    """What the replies of one request share."""

    sampling: SamplingParams
    local: bool
    """Whether the prompt's KV is computed here rather than received."""
    arrived_s: float
    usage: Usage
    started_s: float | None = None
    first_token_s: float | None = None
    ticketed: bool = False
    """Whether a ticket was issued, which the release takes back."""
    admitted: bool = False
    """Whether the router was told; a preempted request is admitted again silently."""
    spare_blocks: list[BlockId] = field(default_factory=list)
    """One for each further reply's copy of the partial last block, until the fork."""
    entries: list["_Entry"] = field(default_factory=list)
    """One until the fork, then those of the replies that have not ended."""


@dataclass(slots=True)
class _Entry:
    seq: Sequence
    request: _Request
    local: bool
    """Whether missing KV is computed here (local prefill, or reading again) rather than received."""
    next_block: int = 0
    """While receiving: the block that the next chunk must start with."""

    @property
    def num_choices(self) -> int:
        """Replies that this sequence stands for: all of them until the fork."""
        return self.seq.sampling.num_choices

    @property
    def order(self) -> tuple[int, int]:
        """Older first."""
        return self.seq.arrival, self.seq.choice


_Key = tuple[RequestId, int]


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
    _requests: dict[RequestId, _Request] = field(default_factory=dict)
    _waiting: deque[_Entry] = field(default_factory=deque)
    _receiving: dict[RequestId, _Entry] = field(default_factory=dict)
    _running: dict[_Key, _Entry] = field(default_factory=dict)
    """Oldest first (dicts keep insertion order; `_start` restores it)."""
    _num_arrived: int = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Replies that hold blocks."""
        return sum(e.num_choices for e in (*self._running.values(), *self._receiving.values()))

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
        return self._release(event.request_id, event.choice)

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
        self, chunks: list[ScheduledChunk], results: list[ChunkResult], now_s: float
    ) -> list[Instruction]:
        """Take in a computed step."""
        instructions: list[Instruction] = []
        for chunk, result in advance(chunks, results):
            entry = self._running[(chunk.seq.request_id, chunk.seq.choice)]
            start = chunk.seq.num_computed - chunk.num_tokens
            num_prompt_computed = max(0, min(chunk.seq.num_computed, chunk.seq.num_prompt) - start)
            entry.request.usage.decode_computed_tokens += num_prompt_computed
            self.prompt_tokens_computed += num_prompt_computed
            register_computed(chunk.seq, self.pool)
            if result.tokens:
                instructions.extend(self._emit_all(entry, result.tokens, now_s))
        return instructions

    # --- arriving and being admitted ---------------------------------------------------------------------

    def _arrive(self, event: Arrived, now_s: float) -> list[Instruction]:
        error = self._refusal(event)
        if error is not None:
            return [Fail(event.request_id, error)]
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
        request = _Request(
            sampling=event.sampling,
            local=event.local_prefill,
            arrived_s=now_s,
            usage=Usage(prompt_tokens=seq.num_prompt),
        )
        entry = _Entry(seq, request, event.local_prefill)
        request.entries.append(entry)
        self._requests[event.request_id] = request
        self._waiting.append(entry)
        return []

    def _refusal(self, event: Arrived) -> CapacityError | None:
        num_tokens = len(event.token_ids) + event.sampling.max_tokens - 1
        num_blocks = -(-num_tokens // self.pool.block_tokens)
        if num_blocks > self.pool.num_blocks:
            return CapacityError(
                f"{len(event.token_ids)} prompt + {event.sampling.max_tokens} new tokens take {num_blocks} blocks, "
                f"this decode worker has {self.pool.num_blocks}; raise --kv-memory or lower max_tokens",
                ever=True,
            )
        num_choices = event.sampling.num_choices
        if num_choices > self.config.max_running:
            return CapacityError(
                f"{num_choices} replies at once, and this decode worker's max_running is "
                f"{self.config.max_running}; ask for fewer with n and best_of, or raise --max-running",
                ever=True,
            )
        prompt_blocks = -(-len(event.token_ids) // self.pool.block_tokens)
        num_spare = self._num_spare(len(event.token_ids), num_choices)
        if prompt_blocks + num_spare > self.pool.num_blocks:
            return CapacityError(
                f"the prompt's {prompt_blocks} blocks and {num_spare} more for {num_choices} replies exceed this "
                f"decode worker's {self.pool.num_blocks}; ask for fewer with n, or raise --kv-memory",
                ever=True,
            )
        if len(self._waiting) >= self.config.max_waiting:
            return CapacityError(
                f"this decode worker's queue is full: {len(self._waiting)} requests wait and max_waiting is "
                f"{self.config.max_waiting}; try again later, or raise --max-waiting"
            )
        return None

    def _num_spare(self, num_prompt: int, num_choices: int) -> int:
        return num_choices - 1 if num_prompt % self.pool.block_tokens else 0

    def _admit_waiting(self, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        while self._waiting:
            entry = self._waiting[0]
            num_running = self.num_running
            if num_running + entry.num_choices > self.config.max_running:
                break
            attach_prefix(entry.seq, self.pool)
            num_spare = self._num_spare(entry.seq.num_prompt, entry.num_choices)
            missing = num_spare + entry.seq.num_blocks_missing(entry.seq.num_tokens, self.pool.block_tokens)
            # One block in hand per running sequence: without it, an admission would be preempted right away.
            in_hand = len(self._running) if num_running else 0
            if missing + in_hand > self.pool.num_free:
                release_blocks(entry.seq, self.pool)
                break
            grown = grow_blocks(entry.seq, entry.seq.num_tokens, self.pool)
            assert grown, "the pool shrank between counting and taking"
            entry.request.spare_blocks = self.pool.allocate(num_spare)
            self._waiting.popleft()
            instructions.extend(self._admit(entry, now_s))
        return instructions

    def _admit(self, entry: _Entry, now_s: float) -> list[Instruction]:
        seq, request = entry.seq, entry.request
        first_time, request.admitted = not request.admitted, True
        if first_time:
            request.started_s = now_s
            self.prompt_tokens_reused += seq.num_cached
            if entry.local:
                request.usage.cached_tokens = seq.num_cached
        if entry.local:
            self._start(entry)
            return [Admit(seq.request_id, seq.num_cached, None)] if first_time else []
        entry.next_block = seq.num_cached // self.pool.block_tokens
        request.ticketed = True
        self._receiving[seq.request_id] = entry
        grant = TicketGrant(entry.next_block, len(seq.blocks) - entry.next_block)
        return [Admit(seq.request_id, seq.num_cached, grant)]

    def _start(self, *entries: _Entry) -> None:
        """Put entries among the running ones, keeping them in order of age."""
        everyone = sorted((*self._running.values(), *entries), key=lambda entry: entry.order)
        self._running = {(entry.seq.request_id, entry.seq.choice): entry for entry in everyone}

    # --- making room -------------------------------------------------------------------------------------

    def _make_room_for_decode(self) -> None:
        """Give each decoding sequence, oldest first, a place for its next position; preempt from the young end."""
        for key, entry in list(self._running.items()):
            while key in self._running and entry.seq.num_left == 1:
                if grow_blocks(entry.seq, entry.seq.num_tokens, self.pool):
                    break
                youngest = next(reversed(self._running.values()))
                self._preempt(youngest)

    def _preempt(self, entry: _Entry) -> None:
        del self._running[(entry.seq.request_id, entry.seq.choice)]
        self._free(entry)
        entry.local = True
        entry.request.usage.num_preemptions += 1
        self.num_preemptions += 1
        # In order of age: an older one may wait already, preempted while the rest was still receiving.
        num_older = sum(waiting.order < entry.order for waiting in self._waiting)
        self._waiting.insert(num_older, entry)

    # --- pages -------------------------------------------------------------------------------------------

    def _take_pages(self, event: ChunkArrived, now_s: float) -> list[Instruction]:
        entry = self._receiving.get(event.request_id)
        if entry is None:
            return [RejectPages(event.acknowledge, "the request has ended here")]
        seq, end = entry.seq, event.first_block + event.num_blocks
        complete = end == len(seq.blocks)
        if (event.num_blocks and event.first_block != entry.next_block) or end > len(seq.blocks):
            return self._reject(event, f"expected blocks from {entry.next_block} of {len(seq.blocks)}")
        if event.first_tokens and (not complete or event.num_tokens != seq.num_prompt):
            return self._reject(event, f"last chunk ends at block {end} of {len(seq.blocks)}")
        if event.first_tokens and len(event.first_tokens) != entry.num_choices:
            return self._reject(
                event, f"{len(event.first_tokens)} first tokens for {entry.num_choices} replies"
            )
        num_scored = 0 if seq.sampling.prompt_logprobs is None else seq.num_prompt - 1
        if event.first_tokens and len(event.prompt_logprobs) != num_scored:
            return self._reject(
                event, f"{len(event.prompt_logprobs)} prompt log-probabilities, not {num_scored}"
            )
        entry.next_block = end
        blocks = blocks_spanned(seq.blocks, event.first_block, event.num_blocks)
        instructions: list[Instruction] = [PlacePages(blocks, event.pages, event.acknowledge)]
        if not event.first_tokens:
            return instructions
        num_tokens = seq.num_prompt - seq.num_computed
        entry.request.usage.transferred_tokens = num_tokens
        self.tokens_transferred += num_tokens
        seq.num_computed = seq.num_prompt
        register_computed(seq, self.pool)
        del self._receiving[seq.request_id]
        self._start(entry)
        seq.prompt_logprobs.extend(event.prompt_logprobs)
        seq.token_ids.append(event.first_tokens[0].token_id)
        return [*instructions, *self._emit_all(entry, event.first_tokens, now_s)]

    def _reject(self, event: ChunkArrived, why: str) -> list[Instruction]:
        message = f"pages of blocks {event.first_block}+{event.num_blocks} do not fit: {why}"
        error = TransferError(message)
        return [
            RejectPages(event.acknowledge, message),
            *self._release(event.request_id),
            Fail(event.request_id, error),
        ]

    # --- tokens ------------------------------------------------------------------------------------------

    def _emit_all(self, entry: _Entry, tokens: tuple[SampledToken, ...], now_s: float) -> list[Instruction]:
        """Report a step's token of one sequence, the first of which is appended already; fork if there are several."""
        instructions, entries = self._fork(entry, tokens) if len(tokens) > 1 else ([], [entry])
        for each, token in zip(entries, tokens, strict=True):
            instructions.extend(self._emit(each, token, now_s))
        return instructions

    def _fork(
        self, entry: _Entry, tokens: tuple[SampledToken, ...]
    ) -> tuple[list[Instruction], list[_Entry]]:
        """Make one sequence per reply out of the one that read the prompt."""
        request, instructions = entry.request, list[Instruction]()
        children: list[_Entry] = []
        for choice in range(1, len(tokens)):
            own = request.spare_blocks.pop() if request.spare_blocks else None
            child = fork_sequence(entry.seq, choice, tokens[choice].token_id, own, self.pool)
            if own is not None:
                instructions.append(
                    CopyBlock(entry.seq.blocks[entry.seq.num_prompt // self.pool.block_tokens], own)
                )
            children.append(_Entry(child, request, entry.local))
        entry.seq.sampling = request.sampling.for_choice(0)
        request.entries.extend(children)
        self._start(*children)
        return instructions, [entry, *children]

    def _emit(self, entry: _Entry, token: SampledToken, now_s: float) -> list[Instruction]:
        """Report the token just appended to `entry`; a finished reply is released here."""
        seq, request = entry.seq, entry.request
        self.tokens_generated += 1
        request.usage.completion_tokens += 1
        prompt_logprobs = tuple(seq.prompt_logprobs) if request.first_token_s is None else ()
        if request.first_token_s is None:
            request.first_token_s = now_s
        reason = self._finish_reason(seq, token.token_id)
        emitted = EmitToken(
            request_id=seq.request_id,
            choice=seq.choice,
            token=token,
            finish=reason,
            usage=replace(request.usage),
            timing=self._timing(request),
            prompt_logprobs=prompt_logprobs,
        )
        return [emitted, *(self._release(seq.request_id, seq.choice) if reason is not None else [])]

    def _timing(self, request: _Request) -> Timing:
        if request.usage.transferred_tokens or request.started_s is None or request.first_token_s is None:
            return Timing()
        return Timing(
            queue_s=request.started_s - request.arrived_s, prefill_s=request.first_token_s - request.started_s
        )

    def _finish_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        if token in seq.sampling.stop_token_ids:
            return FinishReason.STOP
        if token in self.eos_token_ids and not seq.sampling.ignore_eos:
            return FinishReason.STOP
        if seq.num_generated >= seq.sampling.max_tokens or seq.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    # --- the one release path ----------------------------------------------------------------------------

    def _release(self, request_id: RequestId, choice: int | None = None) -> list[Instruction]:
        """Free what a request, or one reply of it, holds in any state; unknown ones are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        for entry in [e for e in request.entries if choice is None or e.seq.choice == choice]:
            request.entries.remove(entry)
            key = (request_id, entry.seq.choice)
            if self._running.pop(key, None) is None and self._receiving.pop(request_id, None) is None:
                self._waiting.remove(entry)
            self._free(entry)
        if request.entries:
            return []
        del self._requests[request_id]
        return [RevokeTicket(request_id)] if request.ticketed else []

    def _free(self, entry: _Entry) -> None:
        """Give back the blocks of a sequence, and those reserved for replies that it has not been forked into."""
        release_blocks(entry.seq, self.pool)
        if entry.num_choices > 1:
            spare, entry.request.spare_blocks = entry.request.spare_blocks, []
            self.pool.free_blocks(spare)
