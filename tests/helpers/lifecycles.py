"""Life cycles and events to feed them, with literal times and ids."""

from phasor.core.ids import Incarnation, RequestId
from phasor.core.request import ChoiceEnd, FinishReason, Timing, Usage
from phasor.router.lifecycle import LifecycleLimits, RequestLifecycle
from phasor.router.lifecycle_events import (
    Admitted,
    CancelLeg,
    Chosen,
    DecodeEnded,
    DeltaArrived,
    Leg,
    PrefillStats,
    Release,
)
from phasor.router.policy import WorkerRef
from phasor.v1.worker_pb2 import Ticket

D = WorkerRef(role="decode", address="127.0.0.1:2", incarnation=Incarnation("inc-d"))
P = WorkerRef(role="prefill", address="127.0.0.1:1", incarnation=Incarnation("inc-p"))
TICKET = Ticket(ticket_id="tkt-1", decode_incarnation="inc-d", num_blocks=7)
STATS = PrefillStats(
    cached_tokens=32,
    computed_tokens=68,
    transferred_tokens=96,
    transferred_bytes=4096,
    queue_s=0.25,
    prefill_s=0.5,
    transfer_s=0.125,
)

RELEASE_D, RELEASE_P = Release(Leg.DECODE, D), Release(Leg.PREFILL, P)
CANCEL_D, CANCEL_P = CancelLeg(Leg.DECODE), CancelLeg(Leg.PREFILL)


def new(deadline_s: float = 60.0) -> RequestLifecycle:
    return RequestLifecycle(
        RequestId("req-1"),
        prompt_tokens=100,
        arrived_s=0.0,
        deadline_s=deadline_s,
        limits=LifecycleLimits(dispatch_timeout_s=5.0, settle_timeout_s=2.0),
        validate=True,
    )


def chosen(now_s: float = 1.0, prefill: WorkerRef | None = P) -> Chosen:
    return Chosen(now_s=now_s, decode=D, prefill=prefill)


def admitted(now_s: float = 2.0, ticket: Ticket | None = TICKET, cached_tokens: int = 0) -> Admitted:
    return Admitted(now_s=now_s, ticket=ticket, cached_tokens=cached_tokens)


def delta(now_s: float, *ids: int) -> DeltaArrived:
    return DeltaArrived(now_s=now_s, num_tokens=len(ids), message=ids)


def ended(now_s: float, num_tokens: int, **usage: int) -> DecodeEnded:
    return DecodeEnded(
        now_s=now_s,
        choices=(ChoiceEnd(index=0, reason=FinishReason.LENGTH, completion_tokens=num_tokens),),
        usage=Usage(completion_tokens=num_tokens, **usage),
        timing=Timing(queue_s=0.0625, prefill_s=0.75),
    )
