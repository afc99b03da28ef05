"""The fleet's mind: lists of events, lists of instructions, no Ray."""

from hypothesis import given
from hypothesis import strategies as st

from phasor.core.ids import Incarnation
from phasor.deploy.fleet_state import (
    Event,
    FleetPolicy,
    FleetState,
    Instruction,
    KillWorker,
    MemberState,
    PingAnswered,
    PingMissed,
    Shutdown,
    StartFailed,
    StartWorker,
    StopWorker,
    Tick,
    WorkerDied,
    WorkerReady,
    WorkerStopped,
)

POLICY = FleetPolicy(
    start_timeout_s=100.0, first_backoff_s=1.0, max_backoff_s=8.0, settled_after_s=60.0, max_missed_pings=3
)


def one(role="decode"):
    return FleetState([role], POLICY)


def ready(at_s, launch=1, slot="decode-0"):
    return WorkerReady(
        at_s=at_s, slot=slot, launch=launch, address="h:1", incarnation=Incarnation(f"inc-{launch}")
    )


def died(at_s, launch=1, slot="decode-0"):
    return WorkerDied(at_s=at_s, slot=slot, launch=launch, error="killed")


def feed(state: FleetState, *events: Event) -> list[Instruction]:
    return [instruction for event in events for instruction in state.handle(event)]


def states(state):
    return [member.state for member in state.members()]


def test_first_tick_starts_every_slot_in_the_order_of_roles():
    state = FleetState(["decode", "prefill", "prefill"], POLICY)
    assert state.next_deadline_s() == 0.0
    assert feed(state, Tick(at_s=5.0)) == [
        StartWorker("decode-0", "decode", 1),
        StartWorker("prefill-0", "prefill", 1),
        StartWorker("prefill-1", "prefill", 1),
    ]
    assert state.next_deadline_s() == 105.0
    assert feed(state, Tick(at_s=6.0)) == []


def test_a_ready_worker_is_listed_with_address_and_incarnation():
    state = one()
    feed(state, Tick(at_s=0.0), ready(3.0))
    (member,) = state.members()
    assert (member.state, member.address, member.incarnation) == (MemberState.READY, "h:1", "inc-1")
    assert state.next_deadline_s() is None


def test_a_dead_worker_is_killed_for_sure_and_replaced_after_its_backoff():
    state = one()
    feed(state, Tick(at_s=0.0), ready(3.0))
    assert feed(state, died(10.0)) == [KillWorker("decode-0", 1, "killed")]
    (member,) = state.members()
    assert (member.state, member.address, member.incarnation, member.last_error) == (
        MemberState.WAITING,
        "",
        None,
        "killed",
    )
    assert state.next_deadline_s() == 11.0
    assert feed(state, Tick(at_s=10.5)) == []
    assert feed(state, Tick(at_s=11.0)) == [StartWorker("decode-0", "decode", 2)]
    feed(state, ready(12.0, launch=2))
    assert state.members()[0].incarnation == "inc-2"
    assert state.members()[0].num_restarts == 1


def test_one_death_seen_three_ways_is_one_restart():
    state = one()
    feed(state, Tick(at_s=0.0), ready(3.0))
    missed = PingMissed(at_s=10.0, slot="decode-0", launch=1)
    assert len(feed(state, died(10.0), died(10.1), missed)) == 1
    assert feed(state, Tick(at_s=11.0), Tick(at_s=11.0)) == [StartWorker("decode-0", "decode", 2)]


def test_events_of_an_older_launch_change_nothing():
    state = one()
    feed(state, Tick(at_s=0.0), died(1.0), Tick(at_s=2.0))
    assert feed(state, ready(3.0, launch=1), died(3.0, launch=1)) == []
    assert states(state) == [MemberState.STARTING]


def test_backoff_doubles_up_to_its_limit():
    state, now_s, waits = one(), 0.0, []
    for launch in range(1, 7):
        feed(state, Tick(at_s=now_s), died(now_s, launch=launch))
        waits.append(state.next_deadline_s() - now_s)
        now_s = state.next_deadline_s()
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_worker_that_lived_long_starts_with_a_clean_record():
    state = one()
    feed(state, Tick(at_s=0.0), died(0.0), Tick(at_s=1.0), died(1.0, launch=2), Tick(at_s=3.0))
    feed(state, ready(4.0, launch=3), died(64.0, launch=3))
    assert state.next_deadline_s() == 65.0
    feed(state, Tick(at_s=65.0), ready(66.0, launch=4), died(67.0, launch=4))
    assert state.next_deadline_s() == 69.0


def test_three_missed_pings_in_a_row_are_a_death_and_an_answer_forgives_two():
    state = one()
    feed(state, Tick(at_s=0.0), ready(1.0))
    missed = PingMissed(at_s=2.0, slot="decode-0", launch=1)
    answered = PingAnswered(at_s=3.0, slot="decode-0", launch=1)
    assert feed(state, missed, missed, answered, missed, missed) == []
    assert states(state) == [MemberState.READY]
    assert feed(state, missed) == [KillWorker("decode-0", 1, "3 pings in a row unanswered")]


def test_a_start_that_takes_too_long_is_killed_and_tried_again():
    state = one()
    feed(state, Tick(at_s=0.0))
    assert feed(state, Tick(at_s=100.0)) == [KillWorker("decode-0", 1, "not ready 100 s after its start")]
    assert feed(state, Tick(at_s=101.0)) == [StartWorker("decode-0", "decode", 2)]


def test_a_wrong_configuration_is_not_tried_again():
    state = FleetState(["decode", "prefill"], POLICY)
    feed(state, Tick(at_s=0.0), ready(1.0))
    failed = StartFailed(
        at_s=2.0, slot="prefill-0", launch=1, error="model.path='x': no such folder", fatal=True
    )
    assert feed(state, failed) == [KillWorker("prefill-0", 1, failed.error)]
    assert states(state) == [MemberState.READY, MemberState.FAILED]
    assert state.next_deadline_s() is None
    assert feed(state, Tick(at_s=1e6)) == []


def test_shutdown_stops_what_runs_and_starts_nothing_more():
    state = FleetState(["decode", "prefill", "prefill"], POLICY)
    feed(state, Tick(at_s=0.0), ready(1.0), died(1.0, slot="prefill-0"))
    todo = feed(state, Shutdown(at_s=2.0), Shutdown(at_s=2.0), Tick(at_s=1e6))
    assert todo == [StopWorker("decode-0", 1), StopWorker("prefill-1", 1)]
    assert not state.stopped
    assert feed(state, WorkerStopped(at_s=3.0, slot="decode-0", launch=1)) == []
    # One that dies while it is being stopped has stopped, too.
    assert feed(state, died(3.0, slot="prefill-1")) == [KillWorker("prefill-1", 1, "killed")]
    assert state.stopped


def test_a_worker_that_gets_ready_while_stopping_is_not_listed():
    state = one()
    feed(state, Tick(at_s=0.0), Shutdown(at_s=1.0))
    assert feed(state, ready(2.0)) == []
    assert states(state) == [MemberState.STOPPING]
    assert state.members()[0].address == ""


SLOTS = ["decode-0", "prefill-0"]
EVENTS = st.lists(
    st.one_of(
        st.builds(lambda dt: ("tick", dt), st.floats(0, 120)),
        st.tuples(st.sampled_from(["ready", "died", "fail", "missed", "answered"]), st.sampled_from(SLOTS)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_every_launch_is_started_once_and_ended_before_the_next(story):
    """Whatever happens in whatever order: at most one live worker per slot, and shutdown always completes."""
    state, now_s = FleetState(["decode", "prefill"], POLICY), 0.0
    alive: dict[str, int] = {}
    for what, detail in story:
        launch = {member.slot: member.launch for member in state.members()}
        if what == "tick":
            now_s += detail
            event: Event = Tick(at_s=now_s)
        elif what == "ready":
            event = ready(now_s, launch=launch[detail], slot=detail)
        elif what == "died":
            event = died(now_s, launch=launch[detail], slot=detail)
        elif what == "fail":
            event = StartFailed(at_s=now_s, slot=detail, launch=launch[detail], error="x", fatal=False)
        else:
            kind = PingMissed if what == "missed" else PingAnswered
            event = kind(at_s=now_s, slot=detail, launch=launch[detail])
        for instruction in state.handle(event):
            if isinstance(instruction, StartWorker):
                assert instruction.slot not in alive
                alive[instruction.slot] = instruction.launch
            else:
                assert alive.pop(instruction.slot) == instruction.launch
        for member in state.members():
            assert (member.state in (MemberState.STARTING, MemberState.READY)) == (member.slot in alive)
            assert bool(member.address) == (member.state is MemberState.READY)
    for instruction in state.handle(Shutdown(at_s=now_s)):
        assert isinstance(instruction, StopWorker)
        state.handle(WorkerStopped(at_s=now_s, slot=instruction.slot, launch=instruction.launch))
    assert state.stopped
