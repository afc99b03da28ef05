"""Both workers' schedulers and pools without tensors, threads or sockets: what a state machine drives.

The KV of a position is simulated as a hash of the tokens up to it. Reading a block that somebody else wrote,
writing one that is shared, or computing from pages of another prompt therefore fails an assertion at once.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from phasor.core.config import SchedulerConfig
from phasor.core.errors import InternalError, PhasorError, TransferError
from phasor.core.ids import BlockId, BlockKey, Incarnation, RequestId
from phasor.core.request import ChoiceEnd, SampledToken, SamplingParams
from phasor.decode_worker import messages as dm
from phasor.decode_worker.scheduler import DecodeScheduler
from phasor.engine.blocks import BlockPool
from phasor.engine.sequence import Sequence
from phasor.engine.step import ChunkResult, ScheduledChunk
from phasor.prefill_worker import scheduler as pm
from phasor.prefill_worker.scheduler import PrefillScheduler
from phasor.v1.worker_pb2 import Ticket

BLOCK = 4
EOS = 7
CONFIG = SchedulerConfig(max_step_tokens=8, max_running=4, max_waiting=5)
NAMESPACE = BlockKey(bytes(32))

Page = tuple[int | None, ...]
Acknowledge = Callable[[str], None]


def next_token(tokens: list[int], seed: int) -> int:
    """The simulated model with its sampler: now and then the end of the text."""
    value = hash((tuple(tokens), seed))
    return EOS if value % 17 == 0 else 10 + value % 89


def solo_replies(prompt: tuple[int, ...], sampling: SamplingParams) -> list[list[int]]:
    """What a request alone on one worker is answered, reply by reply."""
    return [_solo_reply(prompt, sampling.for_choice(index)) for index in range(sampling.num_choices)]


def _solo_reply(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + sampling.max_tokens:
        tokens.append(next_token(tokens, sampling.seed))
        if tokens[-1] == EOS and not sampling.ignore_eos:
            break
    return tokens[len(prompt) :]


def kv_of(tokens: list[int], position: int) -> int:
    return hash(tuple(tokens[: position + 1]))


@dataclass
class Store:
    """A pool with the contents of its blocks."""

    pool: BlockPool
    pages: dict[BlockId, list[int | None]] = field(default_factory=dict)

    def page(self, block: BlockId) -> list[int | None]:
        return self.pages.setdefault(block, [None] * BLOCK)

    def compute(self, chunks: list[ScheduledChunk]) -> list[ChunkResult]:
        """Read all earlier positions of each chunk's sequence, write the new ones, sample."""
        results = []
        for chunk in chunks:
            seq, end = chunk.seq, chunk.seq.num_computed + chunk.num_tokens
            assert end <= len(seq.blocks) * BLOCK, "a position without a slot"
            for position in range(end):
                block, offset = seq.blocks[position // BLOCK], position % BLOCK
                if position < seq.num_computed:
                    found = self.page(block)[offset]
                    assert found == kv_of(seq.token_ids, position), (
                        f"foreign KV at {position} of {seq.request_id}"
                    )
                else:
                    assert self.pool.num_refs(block) == 1, "a shared block is written"
                    assert block not in self.pool._content, "a findable block is written"
                    self.page(block)[offset] = kv_of(seq.token_ids, position)
            choices = range(seq.sampling.num_choices if chunk.samples else 0)
            seeds = [seq.sampling.for_choice(index).seed for index in choices]
            results.append(
                ChunkResult(tuple(SampledToken(next_token(seq.token_ids, seed)) for seed in seeds))
            )
        return results

    def read(self, blocks: Iterable[BlockId]) -> list[Page]:
        return [tuple(self.page(block)) for block in blocks]

    def write(self, blocks: list[BlockId], pages: list[Page], sequences: list[Sequence]) -> None:
        assert len(blocks) == len(pages)
        for block, page in zip(blocks, pages, strict=True):
            # Not held any more when the first token was also the last: placed before anybody else's turn.
            # Held several times if they were forked at once.
            holders = {seq.request_id for seq in sequences if block in seq.blocks}
            assert len(holders) <= 1, "pages are placed in a shared block"
            self.pages[block] = list(page)

    def copy(self, source: BlockId, target: BlockId) -> None:
        assert self.pool.num_refs(target) <= 1, "a shared block is written"
        self.pages[target] = list(self.page(source))

    def check(self, sequences: list[Sequence], spare: Iterable[BlockId] = ()) -> None:
        """Every block in one place; held exactly as often as sequences name it; shared only if whole and findable."""
        self.pool.check()
        held: dict[BlockId, int] = dict.fromkeys(spare, 1)
        for seq in sequences:
            assert len(set(seq.blocks)) == len(seq.blocks), "a block twice in one sequence"
            for block in seq.blocks:
                held[block] = held.get(block, 0) + 1
        for number in range(1, self.pool.num_blocks + 1):
            block = BlockId(number)
            assert self.pool.num_refs(block) == held.get(block, 0), f"block {block}"
            if held.get(block, 0) > 1 and block not in self.pool._content:
                # Another block has its key already: only the replies of one request share it, and only if whole.
                sharing = [seq for seq in sequences if block in seq.blocks]
                assert len({seq.request_id for seq in sharing}) == 1, "a shared block that cannot be found"
                whole = all(seq.blocks.index(block) < seq.num_prompt // BLOCK for seq in sharing)
                assert whole, "a shared block that is not whole"


@dataclass(eq=False)
class Transfer:
    """One ticket's pages on their way: pushed -> (sent) -> staged -> (arrive) -> placed and acknowledged."""

    ticket: Ticket
    request_id: RequestId
    pushed: deque[pm.PushPages] = field(default_factory=deque)
    staged: deque[tuple[pm.PushPages, list[Page]]] = field(default_factory=deque)
    num_unacknowledged: int = 0
    last_sent: bool = False
    ended: bool = False


@dataclass
class Call:
    """One call of the router to a worker: where its events go."""

    report: Callable[[Any], None]
    num_prompt: int = 0
    transfer: Transfer | None = None
    stats: pm.PrefillStats | None = None
    num_choices: int = 1
    num_made: dict[int, int] = field(default_factory=dict)
    ends: dict[int, ChoiceEnd] = field(default_factory=dict)


class SimulatedWorker:
    """What both have: calls, an inbox, and releases that are submitted a moment after their call was closed."""

    def __init__(self, incarnation: str, num_blocks: int) -> None:
        self.incarnation = Incarnation(incarnation)
        self.store = Store(BlockPool(num_blocks + 1, BLOCK))
        self.calls: dict[RequestId, Call] = {}
        self.inbox: deque[Any] = deque()
        self.unsubmitted: deque[RequestId] = deque()
        self.scheduler: Any

    def close_call(self, request_id: RequestId) -> None:
        """The call's `finally`: the entry goes first, the event reaches the engine a moment later."""
        if self.calls.pop(request_id, None) is not None:
            self.unsubmitted.append(request_id)

    def take_event(self) -> None:
        self.carry_out(self.scheduler.handle(self.inbox.popleft(), 0.0))

    def carry_out(self, instructions: list[Any]) -> None:
        """As EngineLoop does."""
        pending = list(instructions)
        while pending:
            for event in self.execute(pending.pop(0)):
                pending.extend(self.scheduler.handle(event, 0.0))

    def execute(self, instruction: Any) -> Iterable[Any]:
        raise NotImplementedError

    def step(self) -> bool:
        """One turn of the engine without events; whether something was computed."""
        chunks, instructions = self.scheduler.plan(0.0)
        assert sum(chunk.num_tokens for chunk in chunks) <= CONFIG.max_step_tokens
        self.carry_out(instructions)
        if chunks:
            self.carry_out(self.scheduler.complete(chunks, self.store.compute(chunks), 0.0))
        return bool(chunks)

    def fail_step(self) -> None:
        """A step that raises: its requests fail, the worker goes on."""
        chunks, instructions = self.scheduler.plan(0.0)
        self.carry_out(instructions)
        for chunk in chunks:
            call = self.calls.get(chunk.seq.request_id)
            if call is not None:
                self.fail_call(chunk.seq.request_id, call, InternalError("computing a step failed"))
            for event in (
                [dm.Released(chunk.seq.request_id)] if self.is_decode else [pm.Released(chunk.seq.request_id)]
            ):
                self.carry_out(self.scheduler.handle(event, 0.0))

    is_decode = False

    def spare_blocks(self) -> list[BlockId]:
        return []

    def fail_call(self, request_id: RequestId, call: Call, error: PhasorError) -> None:
        call.report(error)
        self.close_call(request_id)


class SimulatedDecodeWorker(SimulatedWorker):
    """`phasor.decode_worker.worker` without asyncio: the same instructions carried out in the same order."""

    is_decode = True

    def __init__(self, incarnation: str, num_blocks: int) -> None:
        super().__init__(incarnation, num_blocks)
        self.scheduler = DecodeScheduler(CONFIG, self.store.pool, NAMESPACE, frozenset({EOS}), 1000)
        self.tickets: dict[RequestId, str] = {}
        self.num_tickets = 0

    def call(
        self,
        request_id: RequestId,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        local: bool,
        report: Any,
    ) -> None:
        assert request_id not in self.calls
        self.calls[request_id] = Call(report, num_choices=sampling.num_choices)
        self.inbox.append(
            dm.Arrived(
                request_id=request_id, token_ids=prompt, sampling=sampling, tier=1.0, local_prefill=local
            )
        )

    def submit_release(self) -> None:
        self.inbox.append(dm.Released(self.unsubmitted.popleft()))

    def has_ticket(self, transfer: Transfer) -> bool:
        return self.tickets.get(transfer.request_id) == transfer.ticket.ticket_id

    def execute(self, instruction: Any) -> Iterable[Any]:
        match instruction:
            case dm.PlacePages(blocks, pages, acknowledge):
                self.store.write(blocks, cast(list[Page], pages), self.sequences())
                cast(Acknowledge, acknowledge)("")
            case dm.CopyBlock(source, target):
                self.store.copy(source, target)
            case dm.RejectPages(acknowledge, why):
                cast(Acknowledge, acknowledge)(why)
            case dm.RevokeTicket(request_id):
                self.tickets.pop(request_id, None)
            case dm.Fail(request_id, error):
                if request_id in self.calls:
                    self.fail_call(request_id, self.calls[request_id], error)
            case dm.Admit():
                self._admit(instruction)
            case dm.EmitToken():
                return self._emit(instruction)
        return ()

    def _admit(self, instruction: dm.Admit) -> None:
        call = self.calls.get(instruction.request_id)
        if call is None:
            return
        ticket = None
        if instruction.grant is not None:
            self.num_tickets += 1
            ticket = Ticket(
                ticket_id=f"{self.incarnation}-{self.num_tickets}",
                decode_incarnation=self.incarnation,
                first_block=instruction.grant.first_block,
                num_blocks=instruction.grant.num_blocks,
            )
            self.tickets[instruction.request_id] = ticket.ticket_id
        call.report((ticket, instruction.cached_tokens))

    def _emit(self, instruction: dm.EmitToken) -> Iterable[Any]:
        call = self.calls.get(instruction.request_id)
        if call is None:
            return [dm.Released(instruction.request_id)]
        choice = instruction.choice
        call.report((choice, instruction.token.token_id))
        call.num_made[choice] = call.num_made.get(choice, 0) + 1
        if instruction.finish is None:
            return []
        call.ends[choice] = ChoiceEnd(
            index=choice, reason=instruction.finish, completion_tokens=call.num_made[choice]
        )
        if len(call.ends) == call.num_choices:
            call.report((tuple(call.ends.values()), instruction.usage))
            self.close_call(instruction.request_id)
        return [dm.Released(instruction.request_id, choice)]

    def spare_blocks(self) -> list[BlockId]:
        return [block for request in self.scheduler._requests.values() for block in request.spare_blocks]

    def sequences(self) -> list[Sequence]:
        s = self.scheduler
        return [e.seq for e in [*s._waiting, *s._receiving.values(), *s._running.values()]]


class SimulatedPrefillWorker(SimulatedWorker):
    """`phasor.prefill_worker.worker` without asyncio."""

    def __init__(self, incarnation: str, num_blocks: int) -> None:
        super().__init__(incarnation, num_blocks)
        self.scheduler = PrefillScheduler(CONFIG, self.store.pool, NAMESPACE)
        self.transfers: list[Transfer] = []
        """Those that may still have something on the link."""

    def call(
        self,
        request_id: RequestId,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        ticket: Ticket,
        report: Any,
    ) -> None:
        assert request_id not in self.calls
        transfer = Transfer(ticket, request_id)
        self.transfers.append(transfer)
        self.calls[request_id] = Call(report, len(prompt), transfer)
        self.inbox.append(
            pm.Arrived(
                request_id=request_id,
                token_ids=prompt,
                sampling=sampling,
                tier=1.0,
                first_block=ticket.first_block,
            )
        )

    def submit_release(self) -> None:
        self.inbox.append(pm.Released(self.unsubmitted.popleft()))

    def close_call(self, request_id: RequestId) -> None:
        call = self.calls.get(request_id)
        if call is not None and call.transfer is not None:
            call.transfer.ended = True
        super().close_call(request_id)

    def execute(self, instruction: Any) -> Iterable[Any]:
        call = self.calls.get(instruction.request_id)
        if call is None:
            return ()
        if isinstance(instruction, pm.Refuse):
            self.fail_call(instruction.request_id, call, instruction.error)
            return ()
        assert isinstance(instruction, pm.PushPages) and call.transfer is not None
        call.transfer.pushed.append(instruction)
        call.stats = instruction.stats or call.stats
        return ()

    def send(self, transfer: Transfer) -> None:
        """The link's thread takes the next chunk: its bytes are read now, from blocks that must still be held."""
        push = transfer.pushed.popleft()
        if transfer.ended:
            return
        transfer.staged.append((push, self.store.read(push.blocks)))
        transfer.num_unacknowledged += 1
        transfer.last_sent = bool(push.first_tokens)

    def arrive(self, transfer: Transfer, decode: SimulatedDecodeWorker, *, damage: bool = False) -> None:
        """The decode end has a chunk: staged for its owner, or answered at once when its ticket is void."""
        push, pages = transfer.staged.popleft()
        acknowledge = partial(self.acknowledged, transfer)
        if not decode.has_ticket(transfer):
            acknowledge("no such ticket here")
            return
        if damage:
            decode.inbox.append(dm.TransferBroken(transfer.request_id, TransferError("checksum mismatch")))
            acknowledge("checksum mismatch")
            return
        call = self.calls.get(transfer.request_id)
        decode.inbox.append(
            dm.ChunkArrived(
                request_id=transfer.request_id,
                first_block=push.first_block,
                num_blocks=len(push.blocks),
                pages=pages,
                acknowledge=acknowledge,
                first_tokens=push.first_tokens,
                num_tokens=call.num_prompt if call else -1,
            )
        )

    def acknowledged(self, transfer: Transfer, why: str) -> None:
        call = self.calls.get(transfer.request_id)
        if transfer.ended or call is None or call.transfer is not transfer:
            return
        if why:
            self.fail_call(transfer.request_id, call, TransferError(f"refused pages: {why}"))
            return
        transfer.num_unacknowledged -= 1
        if transfer.last_sent and not transfer.num_unacknowledged:
            assert call.stats is not None
            call.report(call.stats)
            self.close_call(transfer.request_id)

    def sequences(self) -> list[Sequence]:
        s = self.scheduler
        return [r.seq for r in [*s._waiting, *s._reading, *s._handed_over.values()]]
