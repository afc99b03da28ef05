"""Carries out what one request's life cycle says: calls workers, feeds back, writes to the client.

The only place where a request waits. It decides nothing: every decision is `RequestLifecycle`'s.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from phasor.core.clock import Clock
from phasor.core.errors import (
    DeadlineExceededError,
    InternalError,
    PhasorError,
    RequestCancelledError,
    WorkerLostError,
)
from phasor.core.ids import RequestId
from phasor.core.request import SamplingParams
from phasor.router.lifecycle import RequestLifecycle
from phasor.router.lifecycle_events import (
    Acquire,
    Admitted,
    CancelLeg,
    CheckWorker,
    ClientGone,
    DecodeEnded,
    DecodeFailed,
    DeltaArrived,
    Event,
    Fail,
    Finish,
    ForwardDelta,
    Instruction,
    Leg,
    PrefillEnded,
    PrefillFailed,
    PrefillStats,
    Release,
    StartDecode,
    StartPrefill,
    TimePassed,
    WorkerAnswered,
    WorkerLost,
)
from phasor.router.metrics import RequestRecord
from phasor.router.policy import WorkerRef
from phasor.router.registry import Lease, Registry
from phasor.router.reply_stream import ReplyStream
from phasor.router.validation import ReplyShape
from phasor.v1 import inference_pb2, worker_pb2
from phasor.wire import convert, status

_log = logging.getLogger(__name__)

ROPE_TIER = 1.0
"""Default rope has one tier; the position issue derives it per request."""

STREAM_END_TIMEOUT_S = 1.0
"""How long a decode worker may take to close its stream after Finished."""

CALL_MARGIN_S = 1.0
"""A worker's call outlives the request's deadline by this much: the life cycle's deadline, with its clear
message, comes first, and the call's own is a net under it."""

Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A validated request: what is sent to workers."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    shape: ReplyShape = field(default_factory=ReplyShape)
    prompt_text: str = ""
    """For echo."""


class RequestExecution:
    """One request from its first event to its end. Use once.

    Args:
        request: what to send to workers.
        lifecycle: decides.
        registry: reaches the workers and counts what is in flight on them.
        write: sends one response to the client; may wait for a slow one.
        clock: the same as the life cycle's times are from.
        record: is told what the metrics count.
    """

    def __init__(
        self,
        request: PreparedRequest,
        *,
        lifecycle: RequestLifecycle,
        registry: Registry,
        write: Write,
        clock: Clock,
        record: RequestRecord,
    ) -> None:
        self._request, self._lifecycle, self._registry = request, lifecycle, registry
        self._write, self._clock, self._record = write, clock, record
        self._reply = ReplyStream(
            request_id=request.request_id,
            shape=request.shape,
            prompt_text=request.prompt_text,
            token_ids=request.token_ids,
            num_choices=request.sampling.num_choices,
        )
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._leases: dict[Leg, Lease] = {}
        self._legs: dict[Leg, asyncio.Task[None]] = {}
        self._cancelled: set[Leg] = set()
        self._checks: set[asyncio.Task[None]] = set()

    async def run(self, first: Event) -> Finish:
        """Feed `first` and follow the request to its end.

        Returns:
            The terminal instruction, after it was written to the client.

        Raises:
            PhasorError: what the request failed with; everything is released by then.
            asyncio.CancelledError: the client went away; everything is released by then.
        """
        event = first
        try:
            while True:
                for instruction in self._lifecycle.handle(event):
                    if isinstance(instruction, Finish):
                        await self._send_finished(instruction)
                        return instruction
                    if isinstance(instruction, Fail):
                        raise instruction.error
                    if isinstance(instruction, ForwardDelta):
                        await self._send_delta(instruction)
                    else:
                        self._execute(instruction)
                event = await self._next_event()
        except asyncio.CancelledError:
            for instruction in self._lifecycle.handle(ClientGone(now_s=self._clock.now_s())):
                self._execute(instruction)
            raise
        finally:
            await self._close()

    # --- instructions ------------------------------------------------------------------------------------

    def _execute(self, instruction: Instruction) -> None:
        """Carry out an instruction that does not wait."""
        match instruction:
            case Acquire(leg, worker):
                self._acquire(leg, worker)
            case Release(leg, _):
                if leg in self._leases:
                    self._leases.pop(leg).release()
            case StartDecode(worker, local_prefill):
                self._start(Leg.DECODE, self._run_decode(worker, local_prefill))
            case StartPrefill(worker, ticket):
                self._start(Leg.PREFILL, self._run_prefill(worker, ticket))
            case CancelLeg(leg):
                self._cancelled.add(leg)
                self._legs[leg].cancel()
            case CheckWorker(worker):
                self._checks.add(asyncio.create_task(self._check(worker)))
            case Finish() | Fail() | ForwardDelta():
                # Only reached when the client is gone: there is nobody to tell.
                pass

    def _acquire(self, leg: Leg, worker: WorkerRef) -> None:
        def lost(error: PhasorError) -> None:
            self._put(WorkerLost(now_s=self._clock.now_s(), incarnation=worker.incarnation, error=error))

        try:
            self._leases[leg] = self._registry.acquire(worker, lost)
        except WorkerLostError as exc:
            lost(exc)

    async def _send_delta(self, delta: ForwardDelta) -> None:
        # A client that does not read must not hold the workers past the deadline; the life cycle, asked next,
        # finds that it has passed.
        assert isinstance(delta.message, worker_pb2.DecodeEvent)
        try:
            async with asyncio.timeout(self._remaining_s()):
                for response in self._reply.push(delta.message):
                    await self._write(response)
        except TimeoutError:
            _log.warning("request %s: the client stopped reading", self._request.request_id)

    async def _send_finished(self, finish: Finish) -> None:
        try:
            async with asyncio.timeout(max(self._remaining_s(), CALL_MARGIN_S)):
                for response in self._reply.finish(
                    finish.reply, finish.prefill_incarnation, finish.decode_incarnation
                ):
                    await self._write(response)
        except TimeoutError as exc:
            raise DeadlineExceededError(
                f"request {self._request.request_id}: the client stopped reading"
            ) from exc

    # --- events ------------------------------------------------------------------------------------------

    def _put(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def _next_event(self) -> Event:
        wake_at_s = self._lifecycle.wake_at_s
        assert wake_at_s is not None, "the life cycle ended without a terminal instruction"
        try:
            async with asyncio.timeout(max(0.0, wake_at_s - self._clock.now_s())):
                return await self._events.get()
        except TimeoutError:
            return TimePassed(now_s=self._clock.now_s())

    def _remaining_s(self) -> float:
        return max(0.0, self._lifecycle.deadline_s - self._clock.now_s())

    # --- legs --------------------------------------------------------------------------------------------

    def _start(self, leg: Leg, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"{self._request.request_id} {leg}")
        task.add_done_callback(lambda done: self._leg_done(leg, done))
        self._legs[leg] = task

    def _leg_done(self, leg: Leg, task: asyncio.Task[None]) -> None:
        """A leg that ends without reporting would leave its request waiting for its deadline."""
        error: PhasorError
        if task.cancelled():
            if leg in self._cancelled:
                return
            error = WorkerLostError(f"the connection to the {leg} worker was closed")
        elif (bug := task.exception()) is not None:
            _log.error("request %s: bug in its %s call", self._request.request_id, leg, exc_info=bug)
            error = InternalError(
                f"request {self._request.request_id}: {type(bug).__name__}; see the router's log"
            )
        else:
            return
        failed = DecodeFailed if leg is Leg.DECODE else PrefillFailed
        self._put(failed(now_s=self._clock.now_s(), error=error))

    async def _run_decode(self, worker: WorkerRef, local_prefill: bool) -> None:
        request = worker_pb2.DecodeRequest(
            request_id=self._request.request_id,
            token_ids=self._request.token_ids,
            sampling=convert.sampling_to_pb(self._request.sampling),
            rope_tier=ROPE_TIER,
            local_prefill=local_prefill,
            timeout_s=self._remaining_s(),
            incarnation=worker.incarnation,
        )
        try:
            call = self._registry.stub(worker).Decode(request, timeout=self._remaining_s() + CALL_MARGIN_S)
            try:
                await self._read_decode(call)
            except grpc.aio.AioRpcError as exc:
                raise self._leg_error(exc, worker) from exc
            finally:
                # Whatever ended the reading: the worker must not go on for nobody.
                call.cancel()
        except PhasorError as exc:
            self._put(DecodeFailed(now_s=self._clock.now_s(), error=exc))

    async def _read_decode(
        self, call: grpc.aio.UnaryStreamCall[worker_pb2.DecodeRequest, worker_pb2.DecodeEvent]
    ) -> None:
        async for message in call:
            now_s = self._clock.now_s()
            match message.WhichOneof("event"):
                case "admitted":
                    admitted = message.admitted
                    self._record.admitted()
                    ticket = admitted.ticket if admitted.HasField("ticket") else None
                    self._put(Admitted(now_s=now_s, ticket=ticket, cached_tokens=admitted.cached_tokens))
                case "delta":
                    num_tokens = len(message.delta.token_ids)
                    self._record.made_tokens(now_s, choice=message.delta.index, num_tokens=num_tokens)
                    self._put(DeltaArrived(now_s=now_s, num_tokens=num_tokens, message=message))
                case "finished":
                    await self._await_stream_end(call)
                    self._put(_decode_ended(now_s, message.finished))
                    return
                case other:
                    raise InternalError(
                        f"the decode worker sent an event {other!r} that this router does not know"
                    )
        raise InternalError("the decode worker ended its stream without Finished")

    async def _await_stream_end(
        self, call: grpc.aio.UnaryStreamCall[worker_pb2.DecodeRequest, worker_pb2.DecodeEvent]
    ) -> None:
        """Let the worker close its side, not cancelled while it cleans up; the answer is complete."""
        try:
            async with asyncio.timeout(STREAM_END_TIMEOUT_S):
                code = await call.code()
                if code is not grpc.StatusCode.OK:
                    _log.warning("request %s: status %s after Finished", self._request.request_id, code)
        except TimeoutError:
            _log.warning("request %s: the stream stayed open after Finished", self._request.request_id)

    async def _run_prefill(self, worker: WorkerRef, ticket: worker_pb2.Ticket) -> None:
        request = worker_pb2.PrefillRequest(
            request_id=self._request.request_id,
            token_ids=self._request.token_ids,
            sampling=convert.sampling_to_pb(self._request.sampling),
            rope_tier=ROPE_TIER,
            ticket=ticket,
            timeout_s=self._remaining_s(),
            incarnation=worker.incarnation,
        )
        try:
            call = self._registry.stub(worker).Prefill(request, timeout=self._remaining_s() + CALL_MARGIN_S)
            try:
                response = await call
            except grpc.aio.AioRpcError as exc:
                raise self._leg_error(exc, worker) from exc
            finally:
                call.cancel()
        except PhasorError as exc:
            self._put(PrefillFailed(now_s=self._clock.now_s(), error=exc))
            return
        names = PrefillStats.__slots__
        stats = PrefillStats(**{name: getattr(response, name) for name in names})
        self._put(PrefillEnded(now_s=self._clock.now_s(), stats=stats))

    def _leg_error(self, exc: grpc.aio.AioRpcError, worker: WorkerRef) -> PhasorError:
        error = status.error_from_status(exc, peer=str(worker))
        if isinstance(error, RequestCancelledError):
            # We cancelled nothing, so neither did the client: the worker is going down.
            error = WorkerLostError(f"{worker} gave up the request: {error}")
        if exc.code() is grpc.StatusCode.UNAVAILABLE and isinstance(error, WorkerLostError):
            self._registry.suspect(worker, str(error))
        return error

    async def _check(self, worker: WorkerRef) -> None:
        try:
            counts = await self._registry.ask_counts(worker)
        except PhasorError as exc:
            error = WorkerLostError(f"{worker} did not admit the request and does not answer: {exc}")
            self._put(WorkerLost(now_s=self._clock.now_s(), incarnation=worker.incarnation, error=error))
            return
        busy = counts.num_running + counts.num_waiting > 0
        self._put(WorkerAnswered(now_s=self._clock.now_s(), busy=busy))

    async def _close(self) -> None:
        """Leave nothing behind. After a terminal instruction there is nothing left but tasks to collect."""
        for lease in self._leases.values():
            lease.release()
        self._leases.clear()
        self._cancelled.update(Leg)
        tasks = [*self._legs.values(), *self._checks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _decode_ended(now_s: float, message: worker_pb2.DecodeFinished) -> DecodeEnded:
    return DecodeEnded(
        now_s=now_s,
        choices=tuple(convert.choice_end_from_pb(choice) for choice in message.choices),
        usage=convert.usage_from_pb(message.usage),
        timing=convert.timing_from_pb(message.timing),
    )
