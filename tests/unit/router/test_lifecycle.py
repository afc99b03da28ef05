"""The life cycle alone: events in, instructions compared; every race without a clock or a network."""

import pytest

from phasor.core.errors import (
    CapacityError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    TransferError,
    WorkerLostError,
)
from phasor.core.request import Timing, Usage
from phasor.router.lifecycle import RequestLifecycle, State
from phasor.router.lifecycle_events import (
    Acquire,
    CheckWorker,
    ClientGone,
    DecodeFailed,
    Event,
    Fail,
    Finish,
    ForwardDelta,
    Instruction,
    Leg,
    PrefillEnded,
    PrefillFailed,
    Refused,
    StartDecode,
    StartPrefill,
    TimePassed,
    WorkerAnswered,
    WorkerLost,
)
from phasor.v1.worker_pb2 import Ticket
from tests.helpers.lifecycles import (
    CANCEL_D,
    CANCEL_P,
    RELEASE_D,
    RELEASE_P,
    STATS,
    TICKET,
    D,
    P,
    admitted,
    chosen,
    delta,
    ended,
    new,
)


def drive(machine: RequestLifecycle, *events: Event) -> list[Instruction]:
    """Feed events; return what the last one gave."""
    instructions: list[Instruction] = []
    for event in events:
        instructions = machine.handle(event)
    return instructions


def in_state(state: State) -> tuple[RequestLifecycle, list[Instruction]]:
    """A machine in `state`, and the instructions that end it from there (without the terminal one)."""
    machine = new()
    path = {
        State.WAITING: (),
        State.ADMITTING: (chosen(),),
        State.PREFILLING: (chosen(), admitted()),
        State.DECODING: (chosen(), admitted(), delta(3, 7)),
        State.SETTLING: (chosen(), admitted(), delta(3, 7), ended(4, 1)),
    }[state]
    drive(machine, *path)
    assert machine.state is state
    clean_up: dict[State, list[Instruction]] = {
        State.WAITING: [],
        State.ADMITTING: [CANCEL_D, RELEASE_D, RELEASE_P],
        State.PREFILLING: [CANCEL_D, RELEASE_D, CANCEL_P, RELEASE_P],
        State.DECODING: [CANCEL_D, RELEASE_D, CANCEL_P, RELEASE_P],
        State.SETTLING: [CANCEL_P, RELEASE_P],
    }
    return machine, clean_up[state]


LIVE = [State.WAITING, State.ADMITTING, State.PREFILLING, State.DECODING, State.SETTLING]


def test_the_whole_path_through_prefill_and_decode_worker() -> None:
    machine = new()
    assert machine.handle(chosen(1)) == [
        Acquire(Leg.DECODE, D),
        Acquire(Leg.PREFILL, P),
        StartDecode(D, False),
    ]
    assert machine.handle(admitted(2, cached_tokens=16)) == [StartPrefill(P, TICKET)]
    assert machine.handle(delta(4, 7)) == [ForwardDelta((7,))]
    assert machine.handle(PrefillEnded(now_s=5, stats=STATS)) == [RELEASE_P]
    assert machine.handle(delta(6, 8, 9)) == [ForwardDelta((8, 9))]
    release, finish = machine.handle(ended(8, 3, decode_computed_tokens=5, num_preemptions=1))
    assert release == RELEASE_D
    assert isinstance(finish, Finish)
    assert (finish.prefill_incarnation, finish.decode_incarnation) == ("inc-p", "inc-d")
    assert finish.reply.usage == Usage(
        prompt_tokens=100,
        completion_tokens=3,
        cached_tokens=32,
        prefill_computed_tokens=68,
        decode_computed_tokens=5,
        transferred_tokens=96,
        transferred_bytes=4096,
        num_preemptions=1,
    )
    # Queue: 2 s until Prefill was sent, then 0.25 s on the prefill worker.
    assert finish.reply.timing == Timing(
        queue_s=2.25, prefill_s=0.5, transfer_s=0.125, first_token_s=4, total_s=8
    )
    assert machine.state is State.FINISHED
    assert machine.wake_at_s is None


def test_local_prefill_needs_no_ticket_and_reports_what_the_decode_worker_did() -> None:
    machine = new()
    assert machine.handle(chosen(1, prefill=None)) == [Acquire(Leg.DECODE, D), StartDecode(D, True)]
    assert machine.handle(admitted(2, ticket=None, cached_tokens=48)) == []
    assert machine.state is State.DECODING
    machine.handle(delta(3, 7))
    release, finish = machine.handle(ended(4, 1, decode_computed_tokens=52))
    assert release == RELEASE_D
    assert isinstance(finish, Finish)
    assert finish.prefill_incarnation == ""
    assert finish.reply.usage == Usage(
        prompt_tokens=100, completion_tokens=1, cached_tokens=48, decode_computed_tokens=52
    )
    assert finish.reply.timing == Timing(queue_s=1.0625, prefill_s=0.75, first_token_s=3, total_s=4)


def test_policy_refuses() -> None:
    machine = new()
    error = CapacityError("none fits", ever=True)
    assert machine.handle(Refused(now_s=1, error=error)) == [Fail(error)]
    assert machine.state is State.FAILED


def test_decode_worker_refuses_before_prefill_was_sent() -> None:
    machine, error = new(), CapacityError("queue full")
    assert drive(machine, chosen(), DecodeFailed(now_s=2, error=error)) == [RELEASE_D, RELEASE_P, Fail(error)]


def test_prefill_worker_refuses_and_its_twin_is_cancelled_at_once() -> None:
    """Cases A2, B1 and B3."""
    machine, error = new(), InvalidRequestError("prompt", "700 tokens", "too long")
    assert drive(machine, chosen(), admitted(), PrefillFailed(now_s=3, error=error)) == [
        CANCEL_D,
        RELEASE_D,
        RELEASE_P,
        Fail(error),
    ]


@pytest.mark.parametrize("state", [State.ADMITTING, State.PREFILLING, State.DECODING])
def test_decode_worker_dies(state: State) -> None:
    machine, clean_up = in_state(state)
    error = WorkerLostError("killed")
    assert machine.handle(WorkerLost(now_s=5, incarnation=D.incarnation, error=error)) == [
        *clean_up,
        Fail(error),
    ]


@pytest.mark.parametrize("state", [State.ADMITTING, State.PREFILLING])
def test_prefill_worker_dies_before_the_first_token(state: State) -> None:
    machine, clean_up = in_state(state)
    error = WorkerLostError("killed")
    assert machine.handle(WorkerLost(now_s=5, incarnation=P.incarnation, error=error)) == [
        *clean_up,
        Fail(error),
    ]


def test_prefill_worker_dies_after_the_first_token_and_the_answer_goes_on() -> None:
    machine, _ = in_state(State.DECODING)
    lost = WorkerLost(now_s=5, incarnation=P.incarnation, error=WorkerLostError("killed"))
    assert machine.handle(lost) == [CANCEL_P, RELEASE_P]
    # What its call reports while it is being cancelled is late, not a bug.
    assert machine.handle(PrefillFailed(now_s=5, error=TransferError("gone"))) == []
    assert machine.handle(delta(6, 8)) == [ForwardDelta((8,))]
    release, finish = machine.handle(ended(7, 2, transferred_tokens=96, transferred_bytes=10))
    assert release == RELEASE_D and isinstance(finish, Finish)
    assert finish.reply.usage.cached_tokens == 0, "unknown is not claimed"
    assert finish.reply.usage.transferred_tokens == 96, "the decode worker knows"


def test_prefill_call_fails_after_the_first_token_and_the_answer_goes_on() -> None:
    machine, _ = in_state(State.DECODING)
    assert machine.handle(PrefillFailed(now_s=5, error=TransferError("ack lost"))) == [RELEASE_P]
    assert isinstance(machine.handle(ended(7, 1))[-1], Finish)


@pytest.mark.parametrize("state", LIVE)
def test_client_cancels(state: State) -> None:
    machine, clean_up = in_state(state)
    *rest, last = machine.handle(ClientGone(now_s=4.5))
    assert rest == clean_up
    assert isinstance(last, Fail) and isinstance(last.error, RequestCancelledError)
    assert machine.state is State.CANCELLED


@pytest.mark.parametrize("state", [s for s in LIVE if s is not State.SETTLING])
def test_deadline(state: State) -> None:
    machine, clean_up = in_state(state)
    *rest, last = machine.handle(TimePassed(now_s=60.0))
    assert [i for i in rest if not isinstance(i, CheckWorker)] == clean_up
    assert isinstance(last, Fail) and isinstance(last.error, DeadlineExceededError)
    assert f"60.0 s: {state}" in str(last.error) and "timeout_s" in str(last.error)


def test_deadline_while_settling_still_gives_the_complete_answer() -> None:
    machine = new(deadline_s=4.5)
    drive(machine, chosen(), admitted(), delta(3, 7), ended(4, 1))
    assert machine.wake_at_s == 4.5
    assert machine.handle(TimePassed(now_s=4.4)) == []
    *rest, last = machine.handle(TimePassed(now_s=4.5))
    assert rest == [CANCEL_P, RELEASE_P] and isinstance(last, Finish)


def test_a_stream_of_tokens_does_not_outrun_the_deadline() -> None:
    machine, clean_up = in_state(State.DECODING)
    *rest, last = machine.handle(delta(60.5, 8))
    assert rest == clean_up and isinstance(last, Fail)


def test_the_first_token_may_come_before_or_after_the_prefill_call_returns() -> None:
    before, after = new(), new()
    drive(before, chosen(), admitted(), PrefillEnded(now_s=3, stats=STATS), delta(4, 7))
    drive(after, chosen(), admitted(), delta(4, 7), PrefillEnded(now_s=4.5, stats=STATS))
    assert before.handle(ended(5, 1)) == after.handle(ended(5, 1))


def test_max_tokens_1_ends_before_the_prefill_call_returns() -> None:
    """Case B9; and the prefill worker's numbers are still in the answer."""
    machine = new()
    assert drive(machine, chosen(), admitted(), delta(3, 7), ended(3.5, 1)) == [RELEASE_D]
    assert machine.state is State.SETTLING
    release, finish = machine.handle(PrefillEnded(now_s=4, stats=STATS))
    assert release == RELEASE_P and isinstance(finish, Finish)
    assert finish.reply.usage.prefill_computed_tokens == 68
    assert finish.reply.timing.total_s == 3.5, "settling is not part of the answer's time"


@pytest.mark.parametrize(
    ("event", "clean_up"),
    [
        (PrefillFailed(now_s=4.5, error=TransferError("ack lost")), [RELEASE_P]),
        (WorkerLost(now_s=4.5, incarnation=P.incarnation, error=WorkerLostError("x")), [CANCEL_P, RELEASE_P]),
        (TimePassed(now_s=6.0), [CANCEL_P, RELEASE_P]),
    ],
)
def test_a_complete_answer_does_not_fail_for_missing_numbers(
    event: Event, clean_up: list[Instruction]
) -> None:
    machine, _ = in_state(State.SETTLING)
    assert machine.wake_at_s == 6.0
    *rest, last = machine.handle(event)
    assert rest == clean_up and isinstance(last, Finish)


def test_what_arrives_after_the_end_is_ignored() -> None:
    machine, _ = in_state(State.DECODING)
    machine.handle(ClientGone(now_s=4))
    late: list[Event] = [delta(5, 8), ended(5, 2), PrefillEnded(now_s=5, stats=STATS), TimePassed(now_s=99)]
    assert [machine.handle(event) for event in late] == [[], [], [], []]


@pytest.mark.parametrize("claimed", [0, 1, 3])
def test_a_truncated_answer_is_an_error(claimed: int) -> None:
    """Invariant 10: the count of Finished must be what was streamed."""
    machine = new()
    ids = () if claimed == 0 else (7, 8)
    drive(machine, chosen(prefill=None), admitted(ticket=None), delta(3, *ids))
    *rest, last = machine.handle(ended(4, claimed))
    assert rest == [RELEASE_D]
    assert isinstance(last, Fail) and isinstance(last.error, InternalError)


@pytest.mark.parametrize("ticket", [None, Ticket(ticket_id="t", decode_incarnation="inc-other")])
def test_admission_without_a_ticket_of_the_chosen_worker_is_an_error(ticket: Ticket | None) -> None:
    machine = new()
    *rest, last = drive(machine, chosen(), admitted(ticket=ticket))
    assert rest == [CANCEL_D, RELEASE_D, RELEASE_P]
    assert isinstance(last, Fail) and isinstance(last.error, InternalError)


def test_an_unknown_pair_tells_the_story() -> None:
    machine, clean_up = in_state(State.PREFILLING)
    *rest, last = machine.handle(ended(3, 0))
    assert rest == clean_up
    assert isinstance(last, Fail) and isinstance(last.error, InternalError)
    assert "req-1: DecodeEnded while prefilling" in str(last.error)
    assert "+1.000s waiting --Chosen--> admitting; +2.000s admitting --Admitted--> prefilling" in str(
        last.error
    )


def test_the_story_stays_short() -> None:
    machine, _ = in_state(State.DECODING)
    for number in range(1000):
        machine.handle(delta(4 + number / 1000, 8))
    assert "decoding --DeltaArrived x1000--> decoding" in machine.tell_story()


def test_a_busy_decode_worker_may_queue_and_an_idle_one_may_not_forget() -> None:
    machine = new()
    machine.handle(chosen(1))
    assert machine.wake_at_s == 6.0
    assert machine.handle(TimePassed(now_s=6)) == [CheckWorker(D)]
    assert machine.wake_at_s == 60.0, "one question at a time"
    assert machine.handle(WorkerAnswered(now_s=6.5, busy=True)) == []
    assert machine.handle(TimePassed(now_s=11.5)) == [CheckWorker(D)]
    assert machine.handle(WorkerAnswered(now_s=12, busy=False)) == []
    assert machine.handle(TimePassed(now_s=17)) == [CheckWorker(D)]
    *rest, last = machine.handle(WorkerAnswered(now_s=17, busy=False))
    assert rest == [CANCEL_D, RELEASE_D, RELEASE_P]
    assert isinstance(last, Fail) and isinstance(last.error, WorkerLostError)


def test_an_answer_that_crosses_the_admission_changes_nothing() -> None:
    machine = new()
    drive(machine, chosen(1), TimePassed(now_s=6), admitted(6.1))
    assert machine.handle(WorkerAnswered(now_s=6.2, busy=False)) == []
    assert machine.state is State.PREFILLING
