"""What goes into a request's life cycle (events) and what comes out (instructions). Plain data.

Every event carries the moment it happened in the router's monotonic seconds, so that the life cycle owns no
clock. Instructions are executed by `phasor.router.execution`, which feeds the results back as events.
"""

import enum
from dataclasses import dataclass, field

from phasor.core.errors import PhasorError
from phasor.core.ids import Incarnation
from phasor.core.request import ChoiceEnd, FinishedReply, Timing, Usage
from phasor.router.policy import WorkerRef
from phasor.v1.worker_pb2 import Ticket


class Leg(enum.StrEnum):
    """One of the two calls that a request makes to workers."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen(Event):
    """The policy chose workers."""

    decode: WorkerRef
    prefill: WorkerRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """The policy found no workers."""

    error: PhasorError


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted(Event):
    """The decode worker has room and reserved the request's blocks."""

    ticket: Ticket | None
    cached_tokens: int = 0
    """Prompt tokens that the decode worker already held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaArrived(Event):
    """The decode worker made tokens."""

    num_tokens: int
    message: object = None
    """What is passed on to the client, unopened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeEnded(Event):
    """The decode worker finished the request's replies."""

    choices: tuple[ChoiceEnd, ...] = ()
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFailed(Event):
    """The decode call ended with an error, a refusal included."""

    error: PhasorError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStats:
    """What a prefill worker did for one request."""

    cached_tokens: int = 0
    computed_tokens: int = 0
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillEnded(Event):
    """The prefill worker computed everything and the decode worker acknowledged every page."""

    stats: PrefillStats


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFailed(Event):
    """The prefill call ended with an error, a refusal included."""

    error: PhasorError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Event):
    """A worker died, fell silent, or is another incarnation now."""

    incarnation: Incarnation
    error: PhasorError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAnswered(Event):
    """The answer to `CheckWorker`: the decode worker lives."""

    busy: bool
    """Whether it has running or waiting requests, so that ours may be queueing behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientGone(Event):
    """The client cancelled or disconnected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed(Event):
    """Nothing happened until `RequestLifecycle.wake_at_s`. May come early or late."""


@dataclass(frozen=True, slots=True)
class Acquire:
    """Count the request as in flight on `worker`, and report `WorkerLost` until the matching Release."""

    leg: Leg
    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class Release:
    """End what `Acquire` began. Comes exactly once per Acquire."""

    leg: Leg
    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Open the Decode stream."""

    worker: WorkerRef
    local_prefill: bool


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Call Prefill with the decode worker's ticket."""

    worker: WorkerRef
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CancelLeg:
    """Cancel a call that has not ended; the worker then frees everything it holds for the request."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class CheckWorker:
    """Ask the decode worker whether it lives, and report `WorkerAnswered` or `WorkerLost`."""

    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class ForwardDelta:
    """Send text and tokens to the client."""

    message: object


@dataclass(frozen=True, slots=True)
class Finish:
    """Terminal: tell the client that the reply is complete."""

    reply: FinishedReply
    prefill_incarnation: str
    """Empty when the decode worker read the prompt itself."""
    decode_incarnation: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Terminal: end the client's call with this error's status."""

    error: PhasorError


Instruction = (
    Acquire | Release | StartDecode | StartPrefill | CancelLeg | CheckWorker | ForwardDelta | Finish | Fail
)
