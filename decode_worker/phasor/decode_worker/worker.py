"""The decode worker's shell: gRPC in, pages in, engine thread inside, tokens out. The deciding is in `scheduler`.

One `Decode` call, start to end:
    Arrived -> Admit (ticket to the router) -> ChunkArrived ... (pages placed, acknowledged) -> EmitToken ... -> end
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tokenizers import Tokenizer

from phasor.core.errors import ConfigError, DeadlineExceededError, PhasorError, TransferError
from phasor.core.ids import RequestId, TicketId, new_ticket_id
from phasor.core.request import ChoiceEnd, FinishReason, SamplingParams
from phasor.decode_worker.call_log import CallLog
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
    Released,
    RevokeTicket,
    TransferBroken,
)
from phasor.decode_worker.reply import ReplyText
from phasor.decode_worker.scheduler import DecodeScheduler
from phasor.engine.loop import EngineLoop
from phasor.engine.service import WorkerService
from phasor.transport import receiver as transport
from phasor.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from phasor.wire.convert import (
    choice_end_to_pb,
    logprobs_from_pb,
    logprobs_to_pb,
    sampled_from_pb,
    sampling_from_pb,
    timing_to_pb,
    usage_to_pb,
)
from phasor.wire.status import errors_to_status

_STOP_S = 5.0

_log = logging.getLogger(__name__)

StreamItem = worker_pb2.DecodeEvent | PhasorError


@dataclass(slots=True)
class _Request:
    """One call in progress. `replies` belong to the engine thread, `items` to the event loop."""

    replies: list[ReplyText]
    stop_token_ids: frozenset[int]
    min_tokens: int
    timeout_s: float
    items: "asyncio.Queue[StreamItem]" = field(default_factory=asyncio.Queue)
    num_tokens: list[int] = field(init=False)
    """Made so far, by reply."""
    ends: dict[int, ChoiceEnd] = field(default_factory=dict)
    """Replies that ended, by index."""

    def __post_init__(self) -> None:
        self.num_tokens = [0] * len(self.replies)


class DecodeWorker(WorkerService):
    """Writes replies; see the module's docstring for one call's course."""

    role = inference_pb2.WORKER_ROLE_DECODE

    def start_engine(self) -> None:
        """Build scheduler, page receiver and engine loop, and start the engine thread."""
        self._tokenizer = load_tokenizer(self.host.folder / "tokenizer.json")
        self._requests: dict[RequestId, _Request] = {}
        self._tickets: dict[RequestId, TicketId] = {}
        self._by_ticket: dict[TicketId, RequestId] = {}
        self._num_transfer_failures = 0
        self._scheduler = DecodeScheduler(
            self.config.scheduler,
            self.host.pool,
            self.host.identity.namespace(),
            self.host.model.eos_token_ids,
            self.host.max_model_len,
        )
        layout = self.host.layout
        self._receiver = transport.PageReceiver(
            incarnation=self.incarnation,
            identity=self.host.identity,
            block_shape=(layout.num_kv_heads, layout.page_elements),
            dtype=getattr(torch, layout.dtype),
            config=self.config.transport,
            deliver=self._deliver,
        )
        worker_pb2_grpc.add_PeerServicer_to_server(self._receiver, self._server)
        self._engine: EngineLoop[Event, Instruction] = EngineLoop(
            self._scheduler,
            self.host.runner,
            eos_token_ids=self.host.model.eos_token_ids,
            execute=self._execute,
            fail=self._fail_step,
            on_idle=self.check_leaks,
            on_crash=self._on_crash,
        )
        self._engine.start()

    async def stop_engine(self) -> None:
        """Stop the engine thread, then the links."""
        await asyncio.to_thread(self._engine.stop, _STOP_S)
        await self._receiver.close()

    def counts(self) -> inference_pb2.WorkerCounts:
        """Return what this worker holds now (read across threads: each number is right, the set may be mid-step)."""
        pool, scheduler = self.host.pool, self._scheduler
        return inference_pb2.WorkerCounts(
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_open_tickets=self._receiver.num_open_tickets,
            staging_bytes=self._receiver.staging_bytes,
            prompt_tokens_computed_total=scheduler.prompt_tokens_computed,
            prompt_tokens_reused_total=scheduler.prompt_tokens_reused,
            tokens_generated_total=scheduler.tokens_generated,
            tokens_transferred_total=scheduler.tokens_transferred,
            bytes_transferred_total=self._receiver.bytes_received,
            num_leaked_blocks=self.num_leaked_blocks,
            num_preemptions_total=scheduler.num_preemptions,
            num_transfer_failures_total=self._num_transfer_failures,
        )

    async def Decode(self, request: worker_pb2.DecodeRequest, context: Any) -> None:
        """Serve one request: Admitted, then Delta as text becomes certain, then DecodeFinished."""
        async with errors_to_status(context):
            with self.log_failure(request.request_id):
                await self._decode(request, context)

    async def _decode(self, request: worker_pb2.DecodeRequest, context: Any) -> None:
        request_id = self.claim(request.request_id, request.incarnation)
        log = CallLog(request.request_id)
        try:
            tokens = self.check_tokens(request.token_ids)
            sampling = sampling_from_pb(request.sampling)
            entry = self._enter(request_id, sampling, request.timeout_s)
            self._engine.submit(
                Arrived(
                    request_id=request_id,
                    token_ids=tokens,
                    sampling=sampling,
                    tier=request.rope_tier or 1.0,
                    local_prefill=request.local_prefill,
                )
            )
            # `write`, not `yield`: a cancelled call then reaches `finally` at once, not when a generator is
            # finalised.
            async for event in items_until_end(entry.items, entry.timeout_s, request_id):
                log.note(event)
                await context.write(event)
        finally:
            # The one release path of this side: cancel, error, deadline and normal end all pass here.
            self._requests.pop(request_id, None)
            self._engine.submit(Released(request_id))

    def _enter(self, request_id: RequestId, sampling: SamplingParams, timeout_s: float) -> _Request:
        stop_token_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= self.host.model.eos_token_ids
        entry = _Request(
            replies=[ReplyText(self._tokenizer, sampling.stop) for _ in range(sampling.num_choices)],
            stop_token_ids=frozenset(stop_token_ids),
            min_tokens=sampling.min_tokens,
            timeout_s=timeout_s or self.config.transport.timeout_s,
        )
        self._requests[request_id] = entry
        return entry

    def _deliver(self, event: transport.ChunkArrived | transport.TransferFailed) -> None:
        """Take what the transport has, in any thread, and hand it to the engine thread."""
        request_id = self._by_ticket.get(TicketId(event.ticket_id))
        if request_id is None:
            if isinstance(event, transport.ChunkArrived):
                event.acknowledge("the request has ended here")
            return
        if isinstance(event, transport.TransferFailed):
            self._num_transfer_failures += 1
            self._engine.submit(TransferBroken(request_id, event.error))
            return
        last = event.last or worker_pb2.LastChunk()
        if last.first_logprobs and len(last.first_logprobs) != len(last.first_tokens):
            message = (
                f"{len(last.first_logprobs)} log-probabilities for {len(last.first_tokens)} first tokens"
            )
            event.acknowledge(message)
            self._engine.submit(TransferBroken(request_id, TransferError(message)))
            return
        self._engine.submit(
            ChunkArrived(
                request_id=request_id,
                first_block=event.first_block,
                num_blocks=0 if event.pages is None else event.pages.shape[0],
                pages=event.pages,
                acknowledge=event.acknowledge,
                first_tokens=sampled_from_pb(last.first_tokens, last.first_logprobs),
                num_tokens=last.num_tokens,
                # The first token of a prompt has none.
                prompt_logprobs=tuple(map(logprobs_from_pb, last.prompt_logprobs[1:])),
            )
        )

    def _execute(self, instruction: Instruction) -> Iterable[Event]:
        """Carry out one instruction of the scheduler, in the engine thread."""
        if isinstance(instruction, PlacePages):
            if instruction.pages is not None:
                self.host.kv.place(instruction.blocks, cast(torch.Tensor, instruction.pages))
            cast(Callable[[str], None], instruction.acknowledge)("")
            return ()
        if isinstance(instruction, CopyBlock):
            self.host.kv.copy_block(instruction.source, instruction.target)
            return ()
        if isinstance(instruction, RejectPages):
            cast(Callable[[str], None], instruction.acknowledge)(instruction.why)
            return ()
        if isinstance(instruction, RevokeTicket):
            self._revoke(instruction.request_id)
            return ()
        if isinstance(instruction, Fail):
            self._post(instruction.request_id, instruction.error)
            return ()
        if isinstance(instruction, Admit):
            return self._admit(instruction)
        return self._emit(instruction)

    def _admit(self, instruction: Admit) -> Iterable[Event]:
        entry = self._requests.get(instruction.request_id)
        if entry is None:
            # Its call has ended and is about to submit Released. Releasing it here would pull its blocks from
            # under the step that is already planned.
            return ()
        admitted = worker_pb2.Admitted(cached_tokens=instruction.cached_tokens)
        if instruction.grant is not None:
            ticket_id, grant = new_ticket_id(), instruction.grant
            self._tickets[instruction.request_id] = ticket_id
            self._by_ticket[ticket_id] = instruction.request_id
            self._receiver.issue(
                ticket_id,
                first_block=grant.first_block,
                num_blocks=grant.num_blocks,
                deadline_s=entry.timeout_s,
            )
            admitted.ticket.CopyFrom(
                worker_pb2.Ticket(
                    ticket_id=ticket_id,
                    decode_address=self.address,
                    decode_incarnation=self.incarnation,
                    first_block=grant.first_block,
                    num_blocks=grant.num_blocks,
                    first_head=0,
                    num_heads=self.host.layout.num_kv_heads,
                    deadline_s=entry.timeout_s,
                )
            )
        self._post(instruction.request_id, worker_pb2.DecodeEvent(admitted=admitted))
        return ()

    def _emit(self, instruction: EmitToken) -> Iterable[Event]:
        entry = self._requests.get(instruction.request_id)
        if entry is None:
            return (Released(instruction.request_id),)
        token, num_tokens = instruction.token, entry.num_tokens[instruction.choice] + 1
        entry.num_tokens[instruction.choice] = num_tokens
        reply = entry.replies[instruction.choice]
        shown = token.token_id not in entry.stop_token_ids
        may_stop = num_tokens > entry.min_tokens
        text = reply.push(token.token_id, may_stop=may_stop) if shown else ""
        finish = FinishReason.STOP if reply.stop_string else instruction.finish
        if finish is not None:
            text += reply.finish(may_stop=may_stop)
            finish = FinishReason.STOP if reply.stop_string else finish
        event = worker_pb2.DecodeEvent(
            delta=inference_pb2.Delta(
                text=text,
                token_ids=[token.token_id],
                index=instruction.choice,
                logprobs=[] if token.logprobs is None else [logprobs_to_pb(token.logprobs)],
            )
        )
        if instruction.prompt_logprobs:
            first = inference_pb2.TokenLogprobs()  # the first token of a prompt has none
            event.prompt_logprobs.extend([first, *map(logprobs_to_pb, instruction.prompt_logprobs)])
        self._post(instruction.request_id, event)
        if finish is None:
            return ()
        entry.ends[instruction.choice] = ChoiceEnd(
            index=instruction.choice,
            reason=finish,
            stop_string=reply.stop_string,
            completion_tokens=num_tokens,
        )
        if len(entry.ends) == len(entry.replies):
            self._post(instruction.request_id, self._finished(entry, instruction))
        return (Released(instruction.request_id, instruction.choice),)

    def _finished(self, entry: _Request, instruction: EmitToken) -> worker_pb2.DecodeEvent:
        instruction.usage.transferred_bytes = self._bytes_of(instruction)
        finished = worker_pb2.DecodeFinished(
            choices=[choice_end_to_pb(entry.ends[index]) for index in sorted(entry.ends)],
            usage=usage_to_pb(instruction.usage),
            timing=timing_to_pb(instruction.timing),
        )
        return worker_pb2.DecodeEvent(finished=finished)

    def _bytes_of(self, instruction: EmitToken) -> int:
        layout, tokens = self.host.layout, instruction.usage.transferred_tokens
        return layout.num_blocks_for(tokens) * layout.block_bytes

    def _revoke(self, request_id: RequestId) -> None:
        ticket_id = self._tickets.pop(request_id, None)
        if ticket_id is not None:
            del self._by_ticket[ticket_id]
            self._receiver.revoke(ticket_id)

    def _post(self, request_id: RequestId, item: StreamItem) -> None:
        """Put an item on the request's stream, from the engine thread."""
        entry = self._requests.get(request_id)
        if entry is not None:
            self._asyncio_loop.call_soon_threadsafe(entry.items.put_nowait, item)

    def _fail_step(self, request_ids: list[RequestId], error: PhasorError) -> Iterable[Event]:
        for request_id in request_ids:
            self._post(request_id, error)
        return [Released(request_id) for request_id in request_ids]

    def _on_crash(self, error: PhasorError) -> None:
        self.mark_unhealthy()
        for request_id in list(self._requests):
            self._post(request_id, error)


async def items_until_end(
    items: "asyncio.Queue[StreamItem]", timeout_s: float, request_id: RequestId
) -> AsyncIterator[worker_pb2.DecodeEvent]:
    """Yield the stream's events up to and with the last one; raise the error that ends it.

    Raises:
        DeadlineExceededError: the stream has not ended `timeout_s` after the first call.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            item = await asyncio.wait_for(items.get(), max(0.0, deadline_s - time.monotonic()))
        except TimeoutError as exc:
            raise DeadlineExceededError(f"{request_id}: not finished within {timeout_s:.1f} s") from exc
        if isinstance(item, PhasorError):
            raise item
        yield item
        if item.HasField("finished"):
            return


def load_tokenizer(path: Any) -> Tokenizer:
    """Load the model's tokenizer.

    Raises:
        ConfigError: the folder has no usable tokenizer.json.
    """
    if not path.is_file():
        raise ConfigError(
            "model.path", str(path.parent), "has no tokenizer.json; save a fast tokenizer beside the model"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:  # tokenizers raises bare Exception
        raise ConfigError("model.path", str(path), f"is not a tokenizer: {exc}") from exc
