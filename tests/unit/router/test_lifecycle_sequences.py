"""The life cycle under every short sequence of events, and under random long ones."""

import copy
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasor.core.errors import (
    CapacityError,
    InternalError,
    PhasorError,
    TransferError,
    WorkerLostError,
)
from phasor.core.ids import Incarnation
from phasor.router.lifecycle import TERMINAL, RequestLifecycle, State
from phasor.router.lifecycle_events import (
    Acquire,
    Admitted,
    CancelLeg,
    ClientGone,
    DecodeEnded,
    DecodeFailed,
    DeltaArrived,
    Event,
    Fail,
    Finish,
    Instruction,
    Leg,
    PrefillEnded,
    PrefillFailed,
    Refused,
    Release,
    StartDecode,
    StartPrefill,
    TimePassed,
    WorkerAnswered,
    WorkerLost,
)
from tests.helpers.lifecycles import (
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

LIVE = [State.WAITING, State.ADMITTING, State.PREFILLING, State.DECODING, State.SETTLING]


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
