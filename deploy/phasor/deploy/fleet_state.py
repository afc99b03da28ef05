"""Which workers there should be, which are there, and what to do about the difference.

Events in, instructions out: no Ray, no IO, no clock (events carry the time), so every race is a list of
events in a test. `fleet` executes the instructions and feeds back what happened.

         +--------------------- backoff over ---------------------+
         v                                                        |
    STARTING --WorkerReady--> READY --WorkerDied, 3x PingMissed--> WAITING
       |  '------------------- StartFailed, too late ---------------^
       '--StartFailed(fatal)--> FAILED (until shutdown)

    any --Shutdown--> STOPPING --WorkerStopped--> STOPPED

A `launch` numbers the attempts of one slot. An event of an older launch is about a worker that is gone: it is
ignored.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phasor.core.ids import Incarnation

Role = Literal["prefill", "decode"]


class MemberState(enum.StrEnum):
    """Where one slot of the fleet is."""

    WAITING = "waiting"
    """No worker; the next attempt starts when its backoff is over."""
    STARTING = "starting"
    """Placed, loading the model, not yet through its canary."""
    READY = "ready"
    FAILED = "failed"
    """It cannot start (a wrong configuration); trying again would change nothing."""
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicy:
    """How patient the fleet is."""

    start_timeout_s: float = 300.0
    """A worker that is not ready this long after its launch is killed and launched again."""
    first_backoff_s: float = 0.5
    """Wait after the first failure in a row; each further one doubles it."""
    max_backoff_s: float = 30.0
    settled_after_s: float = 60.0
    """A worker that was ready for so long starts with a clean record when it dies."""
    max_missed_pings: int = 3
    """As many unanswered pings in a row make a worker dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What is known of one slot. A snapshot: never changes."""

    slot: str
    """`prefill-0`, `decode-1`: the same for ever; the worker in it changes."""
    role: Role
    state: MemberState
    launch: int
    """Attempts so far; names the worker in this slot that events are about."""
    address: str = ""
    """host:port of the worker's gRPC service while READY."""
    incarnation: Incarnation | None = None
    """While READY."""
    num_restarts: int = 0
    """Launches after the first."""
    last_error: str = ""
    """Why the last worker of this slot ended or could not start."""


# ---- events: what happened, and when


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """The worker of `launch` answered with its address: model loaded, canary passed."""

    at_s: float
    slot: str
    launch: int
    address: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """The worker of `launch` could not start."""

    at_s: float
    slot: str
    launch: int
    error: str
    fatal: bool
    """True for a wrong configuration: the next attempt would end the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDied:
    """The process of `launch` is gone."""

    at_s: float
    slot: str
    launch: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PingMissed:
    """The worker of `launch` did not answer a ping in time."""

    at_s: float
    slot: str
    launch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PingAnswered:
    """The worker of `launch` is alive."""

    at_s: float
    slot: str
    launch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped:
    """A StopWorker was carried out, one way or the other."""

    at_s: float
    slot: str
    launch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. Send one at `next_deadline_s`."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End everything; nothing is started again."""

    at_s: float


Event = WorkerReady | StartFailed | WorkerDied | PingMissed | PingAnswered | WorkerStopped | Tick | Shutdown


# ---- instructions: what to do now


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Place and start a worker; answer with WorkerReady or StartFailed, later perhaps WorkerDied."""

    slot: str
    role: Role
    launch: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End this worker without asking it and give its place back. No answer is expected."""

    slot: str
    launch: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End this worker in good order within the grace period; answer with WorkerStopped."""

    slot: str
    launch: int


Instruction = StartWorker | KillWorker | StopWorker


@dataclass(slots=True)
class _Slot:
    name: str
    role: Role
    state: MemberState = MemberState.WAITING
    launch: int = 0
    address: str = ""
    incarnation: Incarnation | None = None
    due_s: float = 0.0
    """WAITING: when to launch. STARTING: when to give up."""
    ready_since_s: float = 0.0
    num_failures: int = 0
    """In a row; decides the backoff."""
    num_missed_pings: int = 0
    last_error: str = ""


class FleetState:
    """The fleet's mind.

    Args:
        roles: the role of every worker that should exist; fixed for the fleet's life.
        policy: deadlines and backoff.
    """

    def __init__(self, roles: Sequence[Role], policy: FleetPolicy) -> None:
        self._policy = policy
        self._shutting_down = False
        self._slots: dict[str, _Slot] = {}
        counts = {"prefill": 0, "decode": 0}
        for role in roles:
            name = f"{role}-{counts[role]}"
            counts[role] += 1
            self._slots[name] = _Slot(name, role)

    def members(self) -> list[Member]:
        """Return a snapshot of every slot, in the order of `roles`."""
        return [
            Member(
                slot=slot.name,
                role=slot.role,
                state=slot.state,
                launch=slot.launch,
                address=slot.address,
                incarnation=slot.incarnation,
                num_restarts=max(0, slot.launch - 1),
                last_error=slot.last_error,
            )
            for slot in self._slots.values()
        ]

    @property
    def stopped(self) -> bool:
        """Whether a shutdown is complete."""
        return self._shutting_down and all(s.state is MemberState.STOPPED for s in self._slots.values())

    def next_deadline_s(self) -> float | None:
        """Return when the next Tick is due, on the clock of the events; None when nothing waits for time."""
        timed = (MemberState.WAITING, MemberState.STARTING)
        due = [s.due_s for s in self._slots.values() if s.state in timed]
        return min(due, default=None)

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event and return what must be done now, in order."""
        if isinstance(event, Tick):
            return self._tick(event.at_s)
        if isinstance(event, Shutdown):
            return self._shut_down()
        slot = self._slots[event.slot]
        if event.launch != slot.launch:
            return []  # an older worker's last words; it was killed when its launch ended
        if isinstance(event, WorkerReady):
            return self._ready(slot, event)
        if isinstance(event, StartFailed | WorkerDied):
            fatal = isinstance(event, StartFailed) and event.fatal
            return self._lost(slot, event.at_s, event.error, fatal=fatal)
        if isinstance(event, PingMissed):
            return self._missed(slot, event.at_s)
        if isinstance(event, PingAnswered):
            slot.num_missed_pings = 0
            return []
        if slot.state is MemberState.STOPPING:
            slot.state = MemberState.STOPPED
        return []

    def _tick(self, now_s: float) -> list[Instruction]:
        todo: list[Instruction] = []
        for slot in self._slots.values():
            if slot.state is MemberState.STARTING and slot.due_s <= now_s:
                limit = self._policy.start_timeout_s
                todo += self._lost(slot, now_s, f"not ready {limit:g} s after its start", fatal=False)
            elif slot.state is MemberState.WAITING and slot.due_s <= now_s:
                slot.state, slot.launch = MemberState.STARTING, slot.launch + 1
                slot.due_s = now_s + self._policy.start_timeout_s
                todo.append(StartWorker(slot.name, slot.role, slot.launch))
        return todo

    def _ready(self, slot: _Slot, event: WorkerReady) -> list[Instruction]:
        if slot.state is not MemberState.STARTING:
            return []  # stopping already: its StopWorker is under way
        slot.state = MemberState.READY
        slot.address, slot.incarnation = event.address, event.incarnation
        slot.ready_since_s, slot.num_missed_pings = event.at_s, 0
        return []

    def _missed(self, slot: _Slot, now_s: float) -> list[Instruction]:
        if slot.state is not MemberState.READY:
            return []
        slot.num_missed_pings += 1
        if slot.num_missed_pings < self._policy.max_missed_pings:
            return []
        return self._lost(slot, now_s, f"{slot.num_missed_pings} pings in a row unanswered", fatal=False)

    def _lost(self, slot: _Slot, now_s: float, error: str, *, fatal: bool) -> list[Instruction]:
        if slot.state is MemberState.STOPPING:
            slot.state = MemberState.STOPPED
            return [KillWorker(slot.name, slot.launch, error)]
        if slot.state not in (MemberState.STARTING, MemberState.READY):
            return []  # counted already: a death is seen by the start call, the ping and the watch alike
        if slot.state is MemberState.READY and now_s - slot.ready_since_s >= self._policy.settled_after_s:
            slot.num_failures = 0
        slot.state = MemberState.FAILED if fatal else MemberState.WAITING
        slot.due_s = now_s + self._backoff_s(slot.num_failures)
        slot.num_failures += 1
        slot.address, slot.incarnation, slot.last_error = "", None, error
        # Kill even what is said to be dead: it frees the place, and "dead" may only mean "cut off from us".
        return [KillWorker(slot.name, slot.launch, error)]

    def _shut_down(self) -> list[Instruction]:
        todo: list[Instruction] = []
        self._shutting_down = True
        for slot in self._slots.values():
            if slot.state in (MemberState.STARTING, MemberState.READY):
                slot.state = MemberState.STOPPING
                todo.append(StopWorker(slot.name, slot.launch))
            elif slot.state is not MemberState.STOPPING:
                slot.state = MemberState.STOPPED
            slot.address, slot.incarnation = "", None
        return todo

    def _backoff_s(self, num_failures: int) -> float:
        doubled = self._policy.first_backoff_s * 2.0 ** min(num_failures, 32)
        return min(self._policy.max_backoff_s, doubled)
