"""Routers' life cycles over simulated workers: events wait in queues until a state machine delivers them."""

import copy
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

from phasor.core.errors import PhasorError, TransferError, WorkerLostError
from phasor.core.ids import RequestId
from phasor.core.request import SamplingParams, Usage
from phasor.prefill_worker import scheduler as pm
from phasor.router import lifecycle_events as le
from phasor.router.lifecycle import TERMINAL, LifecycleLimits, RequestLifecycle
from phasor.router.policy import WorkerRef
from phasor.v1.worker_pb2 import Ticket
from tests.helpers.simulated_workers import (
    SimulatedDecodeWorker,
    SimulatedPrefillWorker,
    SimulatedWorker,
    Transfer,
    solo_replies,
)


@dataclass
class Request:
    """One client's request: its life cycle, what is on its way to it, and what the client got."""

    lifecycle: RequestLifecycle
    prompt: tuple[int, ...]
    sampling: SamplingParams
    expected: list[list[int]]
    """By reply."""
    events: deque[le.Event] = field(default_factory=deque)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    end: le.Finish | le.Fail | None = None
    local: bool = False

    @property
    def over(self) -> bool:
        return self.lifecycle.state in TERMINAL


class SimulatedPair:
    """A router, a prefill worker and a decode worker. Nothing happens by itself."""

    def __init__(self, num_prefill_blocks: int, num_decode_blocks: int) -> None:
        self.sizes = (num_prefill_blocks, num_decode_blocks)
        self.now_s = 0.0
        self.num_started = 0
        self.leases: dict[str, int] = {}
        self.requests: dict[RequestId, Request] = {}
        self.prefill: SimulatedPrefillWorker
        self.decode: SimulatedDecodeWorker
        self.restart("prefill")
        self.restart("decode")

    # --- workers -----------------------------------------------------------------------------------------

    def restart(self, role: str) -> None:
        """A new process with a new incarnation; whatever the old one held is gone with it."""
        self.num_started += 1
        name = f"{role}-{self.num_started}"
        old: SimulatedWorker | None = getattr(self, role, None)
        if role == "prefill":
            self.prefill = SimulatedPrefillWorker(name, self.sizes[0])
            if old is not None:
                self._lost(old)
                for request_id in list(self.decode.tickets):
                    self.decode.inbox.append(_broken(request_id))
        else:
            self.decode = SimulatedDecodeWorker(name, self.sizes[1])
            if old is not None:
                self._lost(old)
                for transfer in self.prefill.transfers:
                    self.break_transfer(transfer)

    def _lost(self, worker: SimulatedWorker) -> None:
        error = WorkerLostError(f"{worker.incarnation} is lost")
        for request in self.requests.values():
            held = request.lifecycle._held.values()
            if any(ref.incarnation == worker.incarnation for ref in held):
                event = le.WorkerLost(now_s=0, incarnation=worker.incarnation, error=error)
                request.events.append(event)

    def break_transfer(self, transfer: Transfer) -> None:
        """The link ends under a transfer: both ends are told."""
        transfer.staged.clear()
        call = self.prefill.calls.get(transfer.request_id)
        if call is not None and call.transfer is transfer:
            self.prefill.fail_call(transfer.request_id, call, TransferError("the link broke"))
        if self.decode.has_ticket(transfer):
            self.decode.inbox.append(_broken(transfer.request_id))

    # --- requests ----------------------------------------------------------------------------------------

    def start(
        self, prompt: tuple[int, ...], sampling: SamplingParams, *, local: bool, timeout_s: float
    ) -> None:
        request_id = RequestId(f"r{len(self.requests)}")
        lifecycle = RequestLifecycle(
            request_id,
            prompt_tokens=len(prompt),
            arrived_s=self.now_s,
            deadline_s=self.now_s + timeout_s,
            limits=LifecycleLimits(),
            validate=True,
        )
        request = Request(lifecycle, prompt, sampling, solo_replies(prompt, sampling), local=local)
        self.requests[request_id] = request
        decode = WorkerRef(role="decode", address="d", incarnation=self.decode.incarnation)
        prefill = WorkerRef(role="prefill", address="p", incarnation=self.prefill.incarnation)
        self.feed(request, le.Chosen(now_s=0, decode=decode, prefill=None if local else prefill))

    def feed(self, request: Request, event: le.Event) -> None:
        """Give one event to a life cycle and carry out what it says."""
        timed = copy.copy(event)
        object.__setattr__(timed, "now_s", self.now_s)
        was_over = request.over
        for instruction in request.lifecycle.handle(timed):
            assert not was_over, "an ended request asks for something"
            self._execute(request, instruction)

    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds
        for request in self.requests.values():
            wake_at_s = request.lifecycle.wake_at_s
            if wake_at_s is not None and self.now_s >= wake_at_s:
                self.feed(request, le.TimePassed(now_s=0))

    def _execute(self, request: Request, instruction: Any) -> None:
        assert request.end is None, "nothing follows the end"
        request_id = request.lifecycle.request_id
        match instruction:
            case le.Acquire(_, worker):
                self.leases[worker.incarnation] = self.leases.get(worker.incarnation, 0) + 1
            case le.Release(_, worker):
                self.leases[worker.incarnation] -= 1
                assert self.leases[worker.incarnation] >= 0
            case le.StartDecode(worker, local):
                self._start_decode(request, worker, local)
            case le.StartPrefill(worker, ticket):
                self._start_prefill(request, worker, ticket)
            case le.CancelLeg(le.Leg.DECODE):
                self.decode.close_call(request_id)
            case le.CancelLeg(le.Leg.PREFILL):
                self._cancel_prefill(request_id)
            case le.CheckWorker():
                request.events.append(le.WorkerAnswered(now_s=0, busy=True))
            case le.ForwardDelta(message):
                choice, token = cast(tuple[int, int], message)
                request.tokens.setdefault(choice, []).append(token)
            case le.Finish() | le.Fail():
                request.end = instruction

    def _start_decode(self, request: Request, worker: WorkerRef, local: bool) -> None:
        if worker.incarnation != self.decode.incarnation:
            request.events.append(le.DecodeFailed(now_s=0, error=WorkerLostError("restarted")))
            return

        def report(item: Any) -> None:
            request.events.extend(_decode_events(item))

        self.decode.call(request.lifecycle.request_id, request.prompt, request.sampling, local, report)

    def _start_prefill(self, request: Request, worker: WorkerRef, ticket: Ticket) -> None:
        if worker.incarnation != self.prefill.incarnation:
            request.events.append(le.PrefillFailed(now_s=0, error=WorkerLostError("restarted")))
            return

        def report(item: Any) -> None:
            if isinstance(item, PhasorError):
                request.events.append(le.PrefillFailed(now_s=0, error=item))
                return
            assert isinstance(item, pm.PrefillStats)
            stats = le.PrefillStats(cached_tokens=item.cached_tokens, computed_tokens=item.computed_tokens)
            request.events.append(le.PrefillEnded(now_s=0, stats=stats))

        self.prefill.call(request.lifecycle.request_id, request.prompt, request.sampling, ticket, report)

    def _cancel_prefill(self, request_id: RequestId) -> None:
        call = self.prefill.calls.get(request_id)
        self.prefill.close_call(request_id)
        # The abort is announced behind what was sent; the decode end may have closed the ticket by then.
        if call is not None and call.transfer is not None and self.decode.has_ticket(call.transfer):
            self.decode.inbox.append(_broken(request_id))

    # --- what must hold ----------------------------------------------------------------------------------

    def check(self) -> None:
        for worker in (self.prefill, self.decode):
            worker.store.check(worker.sequences(), worker.spare_blocks())
        arrivals = [entry.order for entry in self.decode.scheduler._running.values()]
        assert arrivals == sorted(arrivals), "running requests are in order of arrival"
        waiting = [entry.order for entry in self.decode.scheduler._waiting]
        assert waiting == sorted(waiting), "waiting requests are in order of arrival"
        for request in self.requests.values():
            assert request.over == (request.end is not None)
            for choice, tokens in request.tokens.items():
                expected = request.expected[choice]
                assert tokens == expected[: len(tokens)], (request.lifecycle.request_id, choice)
            if isinstance(request.end, le.Finish):
                assert request.tokens == dict(enumerate(request.expected))
                num_tokens = sum(map(len, request.expected))
                assert request.end.reply.usage.completion_tokens == num_tokens

    def settle(self) -> None:
        """Deliver everything until nothing moves; every request must have ended, and nobody may hold anything."""
        for _ in range(3000):
            if not self.move():
                break
        else:
            raise AssertionError(f"it never comes to rest: {self.story()}")
        self.check()
        assert all(request.over for request in self.requests.values()), f"stuck: {self.story()}"
        assert not any(self.leases.values()), self.leases
        assert not self.decode.tickets and not self.decode.calls and not self.prefill.calls
        assert not self.decode.scheduler._requests, "a request is remembered after its end"
        for worker in (self.prefill, self.decode):
            assert worker.store.pool.num_used == 0 and not worker.scheduler.has_work
            assert worker.scheduler.num_running == worker.scheduler.num_waiting == 0

    def move(self) -> bool:
        """One round: everything under way arrives, both workers compute; whether anything happened."""
        moved = False
        for worker in (self.prefill, self.decode):
            while worker.unsubmitted:
                worker.submit_release()
                moved = True
            while worker.inbox:
                worker.take_event()
                moved = True
            moved |= worker.step()
        for transfer in list(self.prefill.transfers):
            while transfer.pushed:
                self.prefill.send(transfer)
                moved = True
            while transfer.staged:
                self.prefill.arrive(transfer, self.decode)
                moved = True
        for request in self.requests.values():
            while request.events:
                self.feed(request, request.events.popleft())
                moved = True
        # Admissions compute nothing themselves: what they caused is in a queue.
        queues = [self.prefill.inbox, self.decode.inbox, *(r.events for r in self.requests.values())]
        return moved or any(queues)

    def story(self) -> str:
        return "; ".join(
            f"{r.lifecycle.request_id}: {r.lifecycle.tell_story()}"
            for r in self.requests.values()
            if not r.over
        )


def _decode_events(item: Any) -> list[le.Event]:
    if isinstance(item, PhasorError):
        return [le.DecodeFailed(now_s=0, error=item)]
    first, second = item
    if isinstance(first, int):
        return [le.DeltaArrived(now_s=0, num_tokens=1, message=item)]
    if isinstance(second, Usage):
        return [le.DecodeEnded(now_s=0, choices=first, usage=second)]
    ticket, cached_tokens = item
    return [le.Admitted(now_s=0, ticket=ticket, cached_tokens=cached_tokens)]


def _broken(request_id: RequestId) -> Any:
    from phasor.decode_worker.messages import TransferBroken

    return TransferBroken(request_id, TransferError("the prefill worker gave up"))
