"""The life cycle alone: events in, instructions compared; every race without a clock or a network."""

import copy
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasor.core.errors import (
    CapacityError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    PhasorError,
    RequestCancelledError,
    TransferError,
    WorkerLostError,
)
from phasor.core.ids import Incarnation, RequestId
from phasor.core.request import FinishReason, Timing, Usage
from phasor.router.lifecycle import TERMINAL, LifecycleLimits, RequestLifecycle, State
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


def delta(now_s: float, *ids: int, text: str = "x") -> DeltaArrived:
    return DeltaArrived(now_s=now_s, text=text, token_ids=ids)


def ended(now_s: float, num_tokens: int, **usage: int) -> DecodeEnded:
    return DecodeEnded(
        now_s=now_s,
        reason=FinishReason.LENGTH,
        usage=Usage(completion_tokens=num_tokens, **usage),
        timing=Timing(queue_s=0.0625, prefill_s=0.75),
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
    assert machine.handle(delta(4, 7, text="Pa")) == [ForwardDelta("Pa", (7,))]
    assert machine.handle(PrefillEnded(now_s=5, stats=STATS)) == [RELEASE_P]
    assert machine.handle(delta(6, 8, 9, text="ris")) == [ForwardDelta("ris", (8, 9))]
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
    assert machine.handle(delta(6, 8)) == [ForwardDelta("x", (8,))]
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


# --- all sequences -----------------------------------------------------------------------------------------


def alphabet(error: PhasorError) -> list[Event]:
    """One of everything that can happen; times are filled in as a sequence is played."""
    stranger = Incarnation("inc-stranger")
    return [
        chosen(),
        chosen(prefill=None),
        Refused(now_s=0, error=error),
        admitted(),
        admitted(ticket=None),
        delta(0, 7),
        ended(0, 1),
        DecodeFailed(now_s=0, error=error),
        PrefillEnded(now_s=0, stats=STATS),
        PrefillFailed(now_s=0, error=error),
        WorkerLost(now_s=0, incarnation=D.incarnation, error=error),
        WorkerLost(now_s=0, incarnation=P.incarnation, error=error),
        WorkerLost(now_s=0, incarnation=stranger, error=error),
        WorkerAnswered(now_s=0, busy=False),
        WorkerAnswered(now_s=0, busy=True),
        ClientGone(now_s=0),
        TimePassed(now_s=0),
    ]


class Ledger:
    """What the instructions of one request add up to."""

    def __init__(self) -> None:
        self.load: dict[str, int] = {}
        self.started: set[Leg] = set()
        self.cancelled: set[Leg] = set()
        self.reported: set[Leg] = set()
        self.num_terminals = 0
        self.terminal: Finish | Fail | None = None

    def take(self, event: Event, instructions: list[Instruction]) -> None:
        if isinstance(event, DecodeEnded | DecodeFailed):
            self.reported.add(Leg.DECODE)
        if isinstance(event, PrefillEnded | PrefillFailed):
            self.reported.add(Leg.PREFILL)
        for instruction in instructions:
            assert self.num_terminals == 0, "nothing follows a terminal instruction"
            match instruction:
                case Acquire(_, worker):
                    self.load[worker.incarnation] = self.load.get(worker.incarnation, 0) + 1
                case Release(_, worker):
                    self.load[worker.incarnation] -= 1
                    assert self.load[worker.incarnation] >= 0
                case StartDecode():
                    self._start(Leg.DECODE)
                case StartPrefill():
                    self._start(Leg.PREFILL)
                case CancelLeg(leg):
                    assert leg in self.started and leg not in self.cancelled
                    self.cancelled.add(leg)
                case Finish() | Fail():
                    self.num_terminals += 1
                    self.terminal = instruction
                    self.check_closed()

    def _start(self, leg: Leg) -> None:
        assert leg not in self.started, "a leg is opened once"
        self.started.add(leg)
        # Reports before the start were protocol errors, which are about no leg.
        self.reported.discard(leg)

    def check_closed(self) -> None:
        assert all(count == 0 for count in self.load.values()), self.load
        assert self.started <= self.cancelled | self.reported, "every leg is cancelled or has ended"


def play(machine: RequestLifecycle, ledger: Ledger, event: Event, now_s: float) -> None:
    timed = copy.copy(event)
    object.__setattr__(timed, "now_s", now_s)
    was_over = machine.state in TERMINAL
    instructions = machine.handle(timed)
    assert not (was_over and instructions), "an ended request asks for nothing"
    ledger.take(timed, instructions)
    assert (machine.state in TERMINAL) == (ledger.num_terminals == 1)


def finish_off(machine: RequestLifecycle, ledger: Ledger, now_s: float) -> None:
    if machine.state not in TERMINAL:
        play(machine, ledger, ClientGone(now_s=0), now_s)
    assert ledger.num_terminals == 1
    ledger.check_closed()


def test_every_sequence_of_up_to_four_events() -> None:
    events = alphabet(WorkerLostError("x"))
    for sequence in itertools.product(events, repeat=4):
        machine, ledger = new(), Ledger()
        for now_s, event in enumerate(sequence, start=1):
            play(machine, ledger, event, now_s)
        finish_off(machine, ledger, 5)


@pytest.mark.parametrize("state", LIVE)
def test_every_pair_of_events_from_every_state(state: State) -> None:
    events = alphabet(WorkerLostError("x"))
    paths: dict[State, list[Event]] = {
        State.WAITING: [],
        State.ADMITTING: [chosen()],
        State.PREFILLING: [chosen(), admitted()],
        State.DECODING: [chosen(), admitted(), delta(0, 7)],
        State.SETTLING: [chosen(), admitted(), delta(0, 7), ended(0, 1)],
    }
    for pair in itertools.product(events, repeat=2):
        machine, ledger = new(), Ledger()
        for now_s, event in enumerate([*paths[state], *pair], start=1):
            play(machine, ledger, event, now_s)
        finish_off(machine, ledger, 9)


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 16), st.floats(0, 4)), max_size=30),
    start=st.sampled_from([0, 1]),
    deadline_s=st.sampled_from([5.0, 30.0, 1000.0]),
)
def test_random_sequences_keep_the_invariants(
    steps: list[tuple[int, float]], start: int, deadline_s: float
) -> None:
    events = alphabet(CapacityError("x"))
    machine, ledger, now_s = new(deadline_s), Ledger(), 0.0
    for index, wait_s in [(start, 0.0), *steps]:
        now_s += wait_s
        play(machine, ledger, events[index], now_s)
    finish_off(machine, ledger, now_s)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_plausible_runs_always_end_well_formed(data: st.DataObject) -> None:
    """Only events that a correct system can produce: never an InternalError, whatever the order."""
    machine, ledger, now_s, num_deltas = new(), Ledger(), 0.0, 0
    local = data.draw(st.booleans())
    error = TransferError("x")
    play(machine, ledger, chosen(prefill=None if local else P), now_s)
    decode_open, admitted_yet, prefill_open = True, False, False
    while machine.state not in TERMINAL:
        now_s += data.draw(st.floats(0, 3))
        possible: list[Event] = [ClientGone(now_s=0), TimePassed(now_s=0)]
        lost = [D.incarnation] if local else [D.incarnation, P.incarnation]
        possible += [WorkerLost(now_s=0, incarnation=i, error=error) for i in lost]
        if decode_open:
            possible.append(DecodeFailed(now_s=0, error=error))
            if not admitted_yet:
                possible += [admitted(ticket=None if local else TICKET)] * 5
            elif num_deltas or local or prefill_open:
                possible += [delta(0, 7)] * 5
            if num_deltas:
                possible.append(ended(0, num_deltas))
        if prefill_open:
            possible += [PrefillEnded(now_s=0, stats=STATS), PrefillFailed(now_s=0, error=error)]
        event = data.draw(st.sampled_from(possible))
        if isinstance(event, DeltaArrived):
            num_deltas += 1
        if isinstance(event, DecodeEnded | DecodeFailed):
            decode_open = False
        if isinstance(event, PrefillEnded | PrefillFailed):
            prefill_open = False
            if not num_deltas and isinstance(event, PrefillEnded):
                num_deltas += 1
                play(machine, ledger, event, now_s)
                event = delta(0, 7)
        if isinstance(event, Admitted):
            admitted_yet, prefill_open = True, not local
        play(machine, ledger, event, now_s)
    ledger.check_closed()
    if isinstance(ledger.terminal, Fail):
        assert not isinstance(ledger.terminal.error, InternalError), ledger.terminal.error
