"""The prefill worker's shell: gRPC in, engine thread inside, pages out. The deciding is done in `scheduler`.

One `Prefill` call, start to end:
    open the ticket's link -> Arrived -> (engine thread: PushPages per chunk) -> all acknowledged -> Released
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from phasor.core.errors import DeadlineExceededError, PhasorError, TransferError, WorkerLostError
from phasor.core.ids import RequestId
from phasor.core.logs import log_event
from phasor.engine.loop import EngineLoop
from phasor.engine.service import WorkerService
from phasor.prefill_worker.scheduler import (
    Arrived,
    Event,
    Instruction,
    PrefillScheduler,
    PrefillStats,
    PushPages,
    Refuse,
    Released,
)
from phasor.transport.sender import OutgoingTransfer, PageChunk, PageSender
from phasor.v1 import inference_pb2, worker_pb2
from phasor.wire.convert import logprobs_to_pb, sampling_from_pb
from phasor.wire.status import errors_to_status

_STOP_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """One call in progress: where its pages go, and the promise of its last chunk."""

    transfer: OutgoingTransfer
    pushed: "asyncio.Future[PrefillStats]"
    pushed_at_s: float = 0.0


class PrefillWorker(WorkerService):
    """Reads prompts for decode workers; see the module's docstring for one call's course."""

    role = inference_pb2.WORKER_ROLE_PREFILL

    def start_engine(self) -> None:
        """Build scheduler, page sender and engine loop, and start the engine thread."""
        self._requests: dict[RequestId, _Request] = {}
        self._bytes_sent = 0
        self._tokens_sent = 0
        self._num_transfer_failures = 0
        self._scheduler = PrefillScheduler(
            self.config.scheduler, self.host.pool, self.host.identity.namespace()
        )
        self._sender = PageSender(
            incarnation=self.incarnation, identity=self.host.identity, config=self.config.transport
        )
        self._engine: EngineLoop[Event, Instruction] = EngineLoop(
            self._scheduler,
            self.host.runner,
            eos_token_ids=self.host.model.eos_token_ids,
            execute=self._execute,
            fail=self._fail_step,
            on_idle=self._on_idle,
            on_crash=self._on_crash,
        )
        self._engine.start()

    async def stop_engine(self) -> None:
        """Stop the engine thread, then the links."""
        await asyncio.to_thread(self._engine.stop, _STOP_S)
        await self._sender.close()

    def counts(self) -> inference_pb2.WorkerCounts:
        """Return what this worker holds now (read across threads: each number is right, the set may be mid-step)."""
        pool, scheduler = self.host.pool, self._scheduler
        return inference_pb2.WorkerCounts(
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_open_tickets=len(self._requests),
            prompt_tokens_computed_total=scheduler.prompt_tokens_computed,
            prompt_tokens_reused_total=scheduler.prompt_tokens_reused,
            tokens_transferred_total=self._tokens_sent,
            bytes_transferred_total=self._bytes_sent,
            num_leaked_blocks=self.num_leaked_blocks,
            num_transfer_failures_total=self._num_transfer_failures,
        )

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: Any) -> worker_pb2.PrefillResponse:
        """Read a prompt and hand its pages to the ticket's decode worker; returns when all are acknowledged."""
        async with errors_to_status(context):
            with self.log_failure(request.request_id):
                request_id = self.claim(request.request_id, request.incarnation)
                try:
                    return await asyncio.wait_for(
                        self._prefill(request_id, request), request.timeout_s or None
                    )
                except TimeoutError as exc:
                    message = f"{request_id}: reading the prompt took longer than {request.timeout_s:.1f} s"
                    raise DeadlineExceededError(message) from exc
                except (TransferError, WorkerLostError):
                    self._num_transfer_failures += 1
                    raise
        raise AssertionError("unreachable: errors_to_status aborts the call")

    async def _prefill(
        self, request_id: RequestId, request: worker_pb2.PrefillRequest
    ) -> worker_pb2.PrefillResponse:
        tokens = self.check_tokens(request.token_ids)
        transfer = await self._sender.open(request.ticket)
        entry = _Request(transfer, self._asyncio_loop.create_future())
        self._requests[request_id] = entry
        done = False
        try:
            self._engine.submit(
                Arrived(
                    request_id=request_id,
                    token_ids=tokens,
                    sampling=sampling_from_pb(request.sampling),
                    tier=request.rope_tier or 1.0,
                    first_block=request.ticket.first_block,
                )
            )
            stats = await self._until_acknowledged(
                entry, request.timeout_s or self.config.transport.timeout_s
            )
            done = True
            response = self._response(entry, stats, len(tokens), request.ticket)
            self._note(request.request_id, response)
            return response
        finally:
            # The one release path of this side: whatever happened, blocks and ticket go.
            del self._requests[request_id]
            if not done:
                transfer.abort("the prefill ended before its last page was acknowledged")
            self._engine.submit(Released(request_id))

    async def _until_acknowledged(self, entry: _Request, timeout_s: float) -> PrefillStats:
        """Wait for the last chunk and its acknowledgement; a broken transfer ends the wait at once."""
        acknowledged = asyncio.ensure_future(entry.transfer.wait_acknowledged(timeout_s))
        try:
            both: set[asyncio.Future[Any]] = {entry.pushed, acknowledged}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if acknowledged.done():
                await acknowledged
            stats = await entry.pushed
            await acknowledged
            return stats
        finally:
            acknowledged.cancel()
            entry.pushed.cancel()

    def _response(
        self, entry: _Request, stats: PrefillStats, num_tokens: int, ticket: worker_pb2.Ticket
    ) -> worker_pb2.PrefillResponse:
        num_sent = num_tokens - ticket.first_block * self.host.layout.block_tokens
        self._bytes_sent += entry.transfer.num_bytes
        self._tokens_sent += num_sent
        return worker_pb2.PrefillResponse(
            cached_tokens=stats.cached_tokens,
            computed_tokens=stats.computed_tokens,
            transferred_tokens=num_sent,
            transferred_bytes=entry.transfer.num_bytes,
            queue_s=stats.queue_s,
            prefill_s=stats.prefill_s,
            transfer_s=time.monotonic() - entry.pushed_at_s,
        )

    def _note(self, request_id: str, response: worker_pb2.PrefillResponse) -> None:
        """Log and measure a completed hand-over."""
        self.metrics.transferred(response.transfer_s)
        log_event(
            _log,
            "prefilled",
            request_id=request_id,
            cached_tokens=response.cached_tokens,
            computed_tokens=response.computed_tokens,
            queue_s=response.queue_s,
            prefill_s=response.prefill_s,
        )
        log_event(
            _log,
            "transferred",
            request_id=request_id,
            transferred_tokens=response.transferred_tokens,
            transferred_bytes=response.transferred_bytes,
            transfer_s=response.transfer_s,
        )

    def _execute(self, instruction: Instruction) -> Iterable[Event]:
        """Carry out one instruction of the scheduler, in the engine thread."""
        entry = self._requests.get(instruction.request_id)
        if entry is None:
            return ()
        if isinstance(instruction, Refuse):
            self._settle(entry, instruction.error)
            return ()
        last = _last_chunk(instruction)
        pages = self.host.kv.block_slices(instruction.blocks)
        entry.transfer.push(PageChunk(first_block=instruction.first_block, pages=pages, last=last))
        if instruction.stats is not None:
            entry.pushed_at_s = time.monotonic()
            self._settle(entry, instruction.stats)
        return ()

    def _settle(self, entry: _Request, outcome: PrefillStats | PhasorError) -> None:
        def settle() -> None:
            if entry.pushed.done():
                return
            if isinstance(outcome, PhasorError):
                entry.pushed.set_exception(outcome)
            else:
                entry.pushed.set_result(outcome)

        self._asyncio_loop.call_soon_threadsafe(settle)

    def _fail_step(self, request_ids: list[RequestId], error: PhasorError) -> Iterable[Event]:
        for request_id in request_ids:
            entry = self._requests.get(request_id)
            if entry is not None:
                self._settle(entry, error)
        return [Released(request_id) for request_id in request_ids]

    def _on_crash(self, error: PhasorError) -> None:
        self.mark_unhealthy()
        for entry in list(self._requests.values()):
            self._settle(entry, error)

    def _on_idle(self) -> None:
        if self._scheduler.num_running == 0:
            self.check_leaks()


def _last_chunk(push: PushPages) -> worker_pb2.LastChunk | None:
    """Return what the last push tells besides its pages; None for the pushes before it."""
    if push.stats is None:
        return None
    prompt = [
        inference_pb2.TokenLogprobs(),
        *map(logprobs_to_pb, push.prompt_logprobs),
    ]  # the first token has none
    return worker_pb2.LastChunk(
        first_tokens=[token.token_id for token in push.first_tokens],
        num_tokens=push.stats.cached_tokens + push.stats.computed_tokens,
        first_logprobs=[logprobs_to_pb(t.logprobs) for t in push.first_tokens if t.logprobs is not None],
        prompt_logprobs=prompt if push.prompt_logprobs else [],
    )
