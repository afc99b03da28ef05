"""One request's life as a state machine: events in, instructions out.

    WAITING --Chosen--> ADMITTING --Admitted+ticket--> PREFILLING --first Delta--> DECODING -DecodeEnded--+
       |                    |                              |                         ^  |                 |
       |                    +-------Admitted, local--------|-------------------------+  |  P not back yet |
       |                    |                              |                            |                 v
       v                    v                              v                            v             SETTLING
    FAILED / CANCELLED (refused, a leg failed, a worker lost, deadline, client gone)       FINISHED <-----+

Pure: no IO, no clock (events carry the time), no randomness. Whatever the ending, `_end` is the only way
there: it cancels the legs that are open, releases what was acquired, and emits one Finish or Fail, last.
A pair (state, event) that is not in the table is a bug of ours or of a worker: the request ends on that same
path with an InternalError that tells the request's story.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from phasor.core.errors import (
    DeadlineExceededError,
    InternalError,
    PhasorError,
    RequestCancelledError,
    WorkerLostError,
)
from phasor.core.ids import RequestId
from phasor.core.request import FinishedReply, Timing, Usage
from phasor.router.lifecycle_events import (
    Acquire,
    Admitted,
    CancelLeg,
    CheckWorker,
    Chosen,
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
    Refused,
    Release,
    StartDecode,
    StartPrefill,
    TimePassed,
    WorkerAnswered,
    WorkerLost,
)
from phasor.router.policy import WorkerRef

MAX_STORY = 32


class State(enum.StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    """No worker chosen."""
    ADMITTING = "admitting"
    """Decode sent; the decode worker has not said that it has room."""
    PREFILLING = "prefilling"
    """Prefill sent with the ticket; no token yet."""
    DECODING = "decoding"
    """The decode worker has the whole prompt, or reads it itself."""
    SETTLING = "settling"
    """The reply is complete; the prefill worker's numbers are awaited for a moment."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleLimits:
    """Bounds of a request's waits, in seconds."""

    dispatch_timeout_s: float = 5.0
    """How long an idle decode worker may take to admit; a busy one may queue until the request's deadline."""
    settle_timeout_s: float = 2.0
    """How long a complete reply waits for the prefill worker's numbers."""


@dataclass(slots=True)
class Transition:
    """One line of a request's story; repetitions are counted."""

    start: State
    event: str
    finish: State
    now_s: float
    num_times: int = 1


@dataclass(slots=True, kw_only=True)
class _Marks:
    """Named moments, in the router's monotonic seconds."""

    decode_sent_s: float = 0.0
    prefill_sent_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float = 0.0


@dataclass(slots=True)
class RequestLifecycle:
    """The machine of one request. Not thread-safe; owned by one `RequestExecution`.

    Args:
        request_id: for messages.
        prompt_tokens: length of the prompt.
        arrived_s: when the client's call came in.
        deadline_s: the moment, not the duration, by which the reply must be complete.
        limits: bounds of the waits.
        validate: check every invariant after every event (on in tests).
    """

    request_id: RequestId
    prompt_tokens: int
    arrived_s: float
    deadline_s: float
    limits: LifecycleLimits = LifecycleLimits()
    validate: bool = False
    state: State = State.WAITING
    story: list[Transition] = field(default_factory=list)
    num_tokens: int = 0
    """Generated tokens forwarded so far."""
    _held: dict[Leg, WorkerRef] = field(default_factory=dict)
    _open: set[Leg] = field(default_factory=set)
    _workers: dict[Leg, WorkerRef] = field(default_factory=dict)
    _cancelled: set[Leg] = field(default_factory=set)
    _marks: _Marks = field(default_factory=_Marks)
    _check_at_s: float | None = None
    _settle_until_s: float | None = None
    _idle_answers: int = 0
    _decode_cached_tokens: int = 0
    _prefill_stats: PrefillStats | None = None
    _decode_end: DecodeEnded | None = None
    _num_terminals: int = 0

    @property
    def wake_at_s(self) -> float | None:
        """When to feed `TimePassed` if nothing else happens before; None once the request has ended."""
        if self.state in TERMINAL:
            return None
        bounds = (self.deadline_s, self._check_at_s, self._settle_until_s)
        return min(bound for bound in bounds if bound is not None)

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return what to do, in order. Never raises for an event that does not fit.

        A bound that has passed is acted on first, so that a stream of tokens cannot outrun a deadline.
        """
        instructions: list[Instruction] = []
        wake_at_s = self.wake_at_s
        if wake_at_s is not None and event.now_s >= wake_at_s and not isinstance(event, TimePassed):
            instructions += self._step(TimePassed(now_s=event.now_s))
        return instructions + self._step(event)

    def _step(self, event: Event) -> list[Instruction]:
        start = self.state
        handler = _TABLE.get((start, type(event)))
        if start in TERMINAL:
            # Events that were under way when the request ended; their legs are already cancelled.
            instructions: list[Instruction] = []
        elif handler is None:
            instructions = self._unexpected(event)
        else:
            instructions = handler(self, event)
        self._tell(start, event)
        if self.validate:
            self.validate_state()
        return instructions

    def tell_story(self) -> str:
        """Return the request's past transitions as one line."""
        parts = []
        for t in self.story:
            times = f" x{t.num_times}" if t.num_times > 1 else ""
            parts.append(f"+{t.now_s - self.arrived_s:.3f}s {t.start} --{t.event}{times}--> {t.finish}")
        return "; ".join(parts) or "nothing happened yet"

    def validate_state(self) -> None:
        """Assert every invariant that ties the fields together."""
        assert (self.state in TERMINAL) == (self._num_terminals == 1), "exactly one terminal instruction"
        assert self._open <= set(self._held), "an open leg is always counted as load"
        assert set(self._held) <= set(self._workers)
        decode_open, prefill_open = Leg.DECODE in self._open, Leg.PREFILL in self._open
        if self.state is State.WAITING or self.state in TERMINAL:
            assert not self._open and not self._held
        elif self.state is State.ADMITTING:
            assert decode_open and not prefill_open and set(self._held) == set(self._workers)
        elif self.state is State.PREFILLING:
            assert decode_open and Leg.PREFILL in self._workers
            assert prefill_open or self._prefill_stats is not None
        elif self.state is State.DECODING:
            assert decode_open
        elif self.state is State.SETTLING:
            assert not decode_open and prefill_open and self._decode_end is not None
        assert (self._settle_until_s is not None) <= (self.state is State.SETTLING or self.state in TERMINAL)

    # --- waiting -----------------------------------------------------------------------------------------

    def _chosen(self, event: Chosen) -> list[Instruction]:
        self._workers[Leg.DECODE] = event.decode
        if event.prefill is not None:
            self._workers[Leg.PREFILL] = event.prefill
        self._held.update(self._workers)
        self._open.add(Leg.DECODE)
        self._marks.decode_sent_s = event.now_s
        self._check_at_s = event.now_s + self.limits.dispatch_timeout_s
        self.state = State.ADMITTING
        acquired: list[Instruction] = [Acquire(leg, worker) for leg, worker in self._workers.items()]
        return [*acquired, StartDecode(event.decode, event.prefill is None)]

    def _failed(self, event: Refused | DecodeFailed) -> list[Instruction]:
        return self._fail(event.error, ended=Leg.DECODE)

    # --- admitting ---------------------------------------------------------------------------------------

    def _admitted(self, event: Admitted) -> list[Instruction]:
        self._check_at_s = None
        self._decode_cached_tokens = event.cached_tokens
        prefill = self._workers.get(Leg.PREFILL)
        if prefill is None:
            self.state = State.DECODING
            return []
        decode = self._workers[Leg.DECODE]
        if event.ticket is None or event.ticket.decode_incarnation != decode.incarnation:
            return self._fail(self._bug(f"{decode} admitted the request without a ticket of its own"))
        self._open.add(Leg.PREFILL)
        self._marks.prefill_sent_s = event.now_s
        self.state = State.PREFILLING
        return [StartPrefill(prefill, event.ticket)]

    def _worker_answered(self, event: WorkerAnswered) -> list[Instruction]:
        """A busy worker may queue us. An idle one, asked twice, has forgotten us."""
        self._idle_answers = 0 if event.busy else self._idle_answers + 1
        if self._idle_answers >= 2:
            decode = self._workers[Leg.DECODE]
            waited_s = event.now_s - self._marks.decode_sent_s
            return self._fail(
                WorkerLostError(f"{decode} is idle but did not admit the request within {waited_s:.1f} s")
            )
        self._check_at_s = event.now_s + self.limits.dispatch_timeout_s
        return []

    def _nothing(self, event: Event) -> list[Instruction]:
        return []

    # --- prefilling and decoding -------------------------------------------------------------------------

    def _delta(self, event: DeltaArrived) -> list[Instruction]:
        self.state = State.DECODING
        if self._marks.first_token_s is None:
            self._marks.first_token_s = event.now_s
        self.num_tokens += event.num_tokens
        return [ForwardDelta(event.message)]

    def _prefill_ended(self, event: PrefillEnded) -> list[Instruction]:
        if Leg.PREFILL not in self._open:
            return self._late(event)
        self._prefill_stats = event.stats
        instructions = self._end_leg(Leg.PREFILL, cancel=False)
        return instructions + (self._finish() if self.state is State.SETTLING else [])

    def _prefill_failed(self, event: PrefillFailed) -> list[Instruction]:
        if Leg.PREFILL not in self._open:
            return self._late(event)
        return self._without_prefill(event.error, cancel=False)

    def _late(self, event: PrefillEnded | PrefillFailed) -> list[Instruction]:
        """A call may end while our cancelling it is under way; it cannot end without having been open."""
        return [] if Leg.PREFILL in self._cancelled else self._unexpected(event)

    def _worker_lost(self, event: WorkerLost) -> list[Instruction]:
        decode, prefill = self._held.get(Leg.DECODE), self._held.get(Leg.PREFILL)
        if decode is not None and decode.incarnation == event.incarnation:
            return self._fail(event.error)
        if prefill is not None and prefill.incarnation == event.incarnation:
            return self._without_prefill(event.error, cancel=True)
        return []

    def _without_prefill(self, error: PhasorError, *, cancel: bool) -> list[Instruction]:
        """The prefill worker is out. After the first token the decode worker needs nothing more from it."""
        if self.state not in (State.DECODING, State.SETTLING):
            return self._fail(error, ended=None if cancel else Leg.PREFILL)
        instructions = self._end_leg(Leg.PREFILL, cancel=cancel)
        return instructions + (self._finish() if self.state is State.SETTLING else [])

    def _decode_ended(self, event: DecodeEnded) -> list[Instruction]:
        self._decode_end = event
        self._marks.ended_s = event.now_s
        instructions = self._end_leg(Leg.DECODE, cancel=False)
        claimed = event.usage.completion_tokens
        complete = bool(event.choices) and all(choice.completion_tokens > 0 for choice in event.choices)
        if claimed != self.num_tokens or not complete:
            # An empty or truncated answer must never look like a complete one.
            text = f"the decode worker counts {claimed} tokens but streamed {self.num_tokens}"
            return instructions + self._fail(self._bug(text))
        if Leg.PREFILL in self._open:
            self._settle_until_s = event.now_s + self.limits.settle_timeout_s
            self.state = State.SETTLING
            return instructions
        return instructions + self._finish()

    # --- in any state ------------------------------------------------------------------------------------

    def _client_gone(self, event: ClientGone) -> list[Instruction]:
        error = RequestCancelledError(f"request {self.request_id}: the client went away while {self.state}")
        return self._end(State.CANCELLED, Fail(error))

    def _time_passed(self, event: TimePassed) -> list[Instruction]:
        if self.state is State.SETTLING:
            assert self._settle_until_s is not None
            # The answer is complete: missing numbers do not fail it, not even at its deadline.
            return self._finish() if event.now_s >= min(self._settle_until_s, self.deadline_s) else []
        if event.now_s >= self.deadline_s:
            return self._fail(self._deadline_error())
        if self._check_at_s is not None and event.now_s >= self._check_at_s:
            self._check_at_s = None
            return [CheckWorker(self._workers[Leg.DECODE])]
        return []

    def _deadline_error(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"request {self.request_id} was not complete after {self.deadline_s - self.arrived_s:.1f} s: "
            f"{self.state}, {self.num_tokens} tokens made; raise timeout_s or lower max_tokens"
        )

    def _unexpected(self, event: Event) -> list[Instruction]:
        return self._fail(self._bug(f"{type(event).__name__} while {self.state}"))

    def _bug(self, what: str) -> InternalError:
        return InternalError(f"request {self.request_id}: {what}. Its story: {self.tell_story()}")

    # --- the one way out ---------------------------------------------------------------------------------

    def _end_leg(self, leg: Leg, *, cancel: bool) -> list[Instruction]:
        instructions: list[Instruction] = []
        if leg in self._open:
            self._open.remove(leg)
            if cancel:
                self._cancelled.add(leg)
                instructions.append(CancelLeg(leg))
        if leg in self._held:
            instructions.append(Release(leg, self._held.pop(leg)))
        return instructions

    def _end(self, state: State, last: Finish | Fail, *, ended: Leg | None = None) -> list[Instruction]:
        instructions: list[Instruction] = []
        for leg in Leg:
            instructions += self._end_leg(leg, cancel=leg is not ended)
        self.state = state
        self._num_terminals += 1
        return [*instructions, last]

    def _fail(self, error: PhasorError, *, ended: Leg | None = None) -> list[Instruction]:
        return self._end(State.FAILED, Fail(error), ended=ended)

    def _finish(self) -> list[Instruction]:
        prefill = self._workers.get(Leg.PREFILL)
        finish = Finish(
            reply=self._reply(),
            prefill_incarnation=prefill.incarnation if prefill else "",
            decode_incarnation=self._workers[Leg.DECODE].incarnation,
        )
        return self._end(State.FINISHED, finish)

    def _reply(self) -> FinishedReply:
        """Merge what both workers know with what only the router knows."""
        end, stats, marks = self._decode_end, self._prefill_stats, self._marks
        assert end is not None and marks.first_token_s is not None
        local = Leg.PREFILL not in self._workers
        if local:
            cached_tokens = self._decode_cached_tokens
            queue_s = marks.decode_sent_s - self.arrived_s + end.timing.queue_s
            prefill_s = end.timing.prefill_s
        else:
            # A prefix that only the decode worker held was still computed by the prefill worker.
            # Without the prefill worker's numbers nothing is known to be cached.
            cached_tokens = max(0, self.prompt_tokens - stats.computed_tokens) if stats else 0
            queue_s = marks.prefill_sent_s - self.arrived_s + (stats.queue_s if stats else 0.0)
            prefill_s = stats.prefill_s if stats else 0.0
        usage = Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=end.usage.completion_tokens,
            cached_tokens=cached_tokens,
            prefill_computed_tokens=stats.computed_tokens if stats else 0,
            decode_computed_tokens=end.usage.decode_computed_tokens,
            transferred_tokens=stats.transferred_tokens if stats else end.usage.transferred_tokens,
            transferred_bytes=stats.transferred_bytes if stats else end.usage.transferred_bytes,
            num_preemptions=end.usage.num_preemptions,
        )
        timing = Timing(
            queue_s=queue_s,
            prefill_s=prefill_s,
            transfer_s=stats.transfer_s if stats else end.timing.transfer_s,
            first_token_s=marks.first_token_s - self.arrived_s,
            total_s=marks.ended_s - self.arrived_s,
        )
        return FinishedReply(choices=end.choices, usage=usage, timing=timing)

    def _tell(self, start: State, event: Event) -> None:
        last = self.story[-1] if self.story else None
        name = type(event).__name__
        if last is not None and (last.start, last.event, last.finish) == (start, name, self.state):
            last.num_times += 1
        elif len(self.story) < MAX_STORY:
            self.story.append(Transition(start, name, self.state, event.now_s))


Handler = Callable[[RequestLifecycle, Any], list[Instruction]]


def _rows(
    state: State, handlers: Sequence[tuple[type[Event], Handler]]
) -> dict[tuple[State, type[Event]], Handler]:
    anywhere: list[tuple[type[Event], Handler]] = [
        (ClientGone, RequestLifecycle._client_gone),
        (TimePassed, RequestLifecycle._time_passed),
    ]
    return {(state, event): handler for event, handler in [*anywhere, *handlers]}


_L = RequestLifecycle
_TABLE: dict[tuple[State, type[Event]], Handler] = {
    **_rows(State.WAITING, [(Chosen, _L._chosen), (Refused, _L._failed)]),
    **_rows(
        State.ADMITTING,
        [
            (Admitted, _L._admitted),
            (DecodeFailed, _L._failed),
            (WorkerLost, _L._worker_lost),
            (WorkerAnswered, _L._worker_answered),
        ],
    ),
    **_rows(
        State.PREFILLING,
        [
            (DeltaArrived, _L._delta),
            (DecodeFailed, _L._failed),
            (PrefillEnded, _L._prefill_ended),
            (PrefillFailed, _L._prefill_failed),
            (WorkerLost, _L._worker_lost),
            (WorkerAnswered, _L._nothing),
        ],
    ),
    **_rows(
        State.DECODING,
        [
            (DeltaArrived, _L._delta),
            (DecodeEnded, _L._decode_ended),
            (DecodeFailed, _L._failed),
            (PrefillEnded, _L._prefill_ended),
            (PrefillFailed, _L._prefill_failed),
            (WorkerLost, _L._worker_lost),
            (WorkerAnswered, _L._nothing),
        ],
    ),
    **_rows(
        State.SETTLING,
        [
            (PrefillEnded, _L._prefill_ended),
            (PrefillFailed, _L._prefill_failed),
            (WorkerLost, _L._worker_lost),
            (WorkerAnswered, _L._nothing),
        ],
    ),
}
"""(state, event) -> handler. What is not here does not happen in a correct system."""
