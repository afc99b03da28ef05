"""The prefill scheduler without tensors: events in, instructions out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasor.core.config import SchedulerConfig
from phasor.core.errors import CapacityError
from phasor.core.ids import BlockKey, RequestId
from phasor.core.request import SampledToken, SamplingParams
from phasor.engine.blocks import BlockPool
from phasor.engine.step import ChunkResult
from phasor.prefill_worker.scheduler import Arrived, PrefillScheduler, PushPages, Refuse, Released

BLOCK = 4


def make(num_blocks: int = 17, **config: int) -> PrefillScheduler:
    limits = SchedulerConfig(**{"max_step_tokens": 8, "max_running": 4, "max_waiting": 4, **config})
    return PrefillScheduler(limits, BlockPool(num_blocks, BLOCK), BlockKey(bytes(32)))


def arrived(name: str, tokens: list[int], first_block: int = 0) -> Arrived:
    return Arrived(
        request_id=RequestId(name),
        token_ids=tuple(tokens),
        sampling=SamplingParams(),
        tier=1.0,
        first_block=first_block,
    )


def first(push: PushPages) -> int | None:
    return push.first_tokens[0].token_id if push.first_tokens else None


def step(scheduler: PrefillScheduler, now_s: float = 0.0) -> list[PushPages]:
    """Plan and complete one step; each finished prompt samples token 99."""
    chunks, before = scheduler.plan(now_s)
    results = [ChunkResult((SampledToken(99),) if c.samples else ()) for c in chunks]
    after = scheduler.complete(chunks, results, now_s)
    scheduler.pool.check()
    return [i for i in [*before, *after] if isinstance(i, PushPages)]


def test_pages_leave_chunk_by_chunk_and_the_last_brings_the_first_token() -> None:
    scheduler = make()
    scheduler.handle(arrived("a", list(range(18))), 1.0)
    pushes = [step(scheduler, now_s) for now_s in (2.0, 3.0, 4.5)]
    shape = [[(p.first_block, len(p.blocks), first(p)) for p in push] for push in pushes]
    assert shape == [[(0, 2, None)], [(2, 2, None)], [(4, 1, 99)]]
    stats = pushes[2][0].stats
    assert stats is not None
    assert (stats.queue_s, stats.prefill_s, stats.computed_tokens, stats.cached_tokens) == (1.0, 2.5, 18, 0)


def test_blocks_are_held_until_released_then_stay_findable() -> None:
    scheduler = make()
    scheduler.handle(arrived("a", list(range(10))), 0.0)
    step(scheduler)
    step(scheduler)
    assert scheduler.pool.num_used == 3
    scheduler.handle(Released(RequestId("a")), 0.0)
    assert (scheduler.pool.num_used, scheduler.pool.num_cached) == (0, 2)


def test_a_known_prefix_is_pushed_at_once_and_not_computed() -> None:
    scheduler = make()
    scheduler.handle(arrived("a", list(range(12))), 0.0)
    step(scheduler)
    step(scheduler)
    scheduler.handle(Released(RequestId("a")), 0.0)
    scheduler.handle(arrived("b", [*range(12), 50, 51]), 0.0)
    chunks, before = scheduler.plan(0.0)
    assert [(i.first_block, len(i.blocks)) for i in before if isinstance(i, PushPages)] == [(0, 3)]
    assert [(c.seq.num_computed, c.num_tokens) for c in chunks] == [(12, 2)]


def test_a_prompt_that_is_wholly_cached_computes_its_last_block_again() -> None:
    scheduler = make()
    for name in ("a", "b"):
        scheduler.handle(arrived(name, list(range(8))), 0.0)
        pushes = step(scheduler)
        scheduler.handle(Released(RequestId(name)), 0.0)
    stats = pushes[-1].stats
    assert stats is not None
    assert (stats.cached_tokens, stats.computed_tokens) == (4, 4)


def test_blocks_the_decode_worker_holds_are_not_sent() -> None:
    scheduler = make()
    scheduler.handle(arrived("a", list(range(14)), first_block=3), 0.0)
    pushes = [*step(scheduler), *step(scheduler)]
    assert [(p.first_block, len(p.blocks), first(p)) for p in pushes] == [(3, 1, 99)]


def test_budget_is_shared_first_come_first_served() -> None:
    scheduler = make(max_step_tokens=8)
    scheduler.handle(arrived("a", list(range(5))), 0.0)
    scheduler.handle(arrived("b", list(range(20, 26))), 0.0)
    chunks, _ = scheduler.plan(0.0)
    assert [(c.seq.request_id, c.num_tokens) for c in chunks] == [("a", 5), ("b", 3)]


def test_a_prompt_larger_than_the_pool_is_refused_for_ever() -> None:
    scheduler = make(num_blocks=4)
    (refusal,) = scheduler.handle(arrived("a", list(range(13))), 0.0)
    assert isinstance(refusal, Refuse) and isinstance(refusal.error, CapacityError) and refusal.error.ever


def test_a_full_queue_refuses_for_now() -> None:
    scheduler = make(num_blocks=4, max_waiting=1)
    assert scheduler.handle(arrived("a", list(range(4))), 0.0) == []
    (refusal,) = scheduler.handle(arrived("b", list(range(4))), 0.0)
    assert isinstance(refusal, Refuse) and isinstance(refusal.error, CapacityError) and not refusal.error.ever


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3], ids=["waiting", "reading", "reading on", "handed over"])
def test_a_release_frees_once_in_any_state_and_again_changes_nothing(num_steps: int) -> None:
    scheduler = make()
    other = arrived("other", list(range(50, 59)))
    scheduler.handle(arrived("a", list(range(18))), 0.0)
    scheduler.handle(other, 0.0)
    for _ in range(num_steps):
        step(scheduler)
    scheduler.handle(Released(RequestId("a")), 0.0)
    scheduler.pool.check()
    used, free = scheduler.pool.num_used, scheduler.pool.num_free
    for name in ("a", "nobody", "a"):
        scheduler.handle(Released(RequestId(name)), 0.0)
        scheduler.pool.check()
        assert (scheduler.pool.num_used, scheduler.pool.num_free) == (used, free)
    tokens = [first(push) for _ in range(4) for push in step(scheduler)]
    scheduler.handle(Released(RequestId("other")), 0.0)
    assert 99 in tokens or num_steps == 3, "the other one is not disturbed"
    assert scheduler.pool.num_used == 0 and scheduler.num_running == scheduler.num_waiting == 0


def test_waiting_for_room_takes_nothing_and_goes_on_after_a_release() -> None:
    scheduler = make(num_blocks=4)
    scheduler.handle(arrived("a", list(range(10))), 0.0)
    scheduler.handle(arrived("b", list(range(20, 30))), 0.0)
    step(scheduler)
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    scheduler.handle(Released(RequestId("a")), 0.0)
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("asr"), st.integers(0, 5), st.integers(1, 30)), max_size=60))
def test_whatever_happens_everything_returns(events: list[tuple[str, int, int]]) -> None:
    """Random arrivals, steps and releases in any state: each live prompt is pushed whole, once, in order."""
    scheduler = make(num_blocks=13)
    names: list[RequestId] = []
    pushed: dict[RequestId, int] = {}

    def account(pushes: list[PushPages]) -> None:
        for push in pushes:
            assert pushed.get(push.request_id, 0) == push.first_block
            pushed[push.request_id] = push.first_block + len(push.blocks)

    for number, (what, which, length) in enumerate(events):
        if what == "a":
            name = RequestId(f"r{number}")
            if not scheduler.handle(
                arrived(name, [which] * (length // 2) + list(range(length // 2 + 1))), 0.0
            ):
                names.append(name)
        elif what == "s":
            account(step(scheduler))
        elif names:
            scheduler.handle(Released(names.pop(which % len(names))), 0.0)
        scheduler.pool.check()
    for _ in range(40):
        account(step(scheduler))
        for name in list(names):
            if pushed.get(name) is not None and name not in [r.seq.request_id for r in scheduler._reading]:
                scheduler.handle(Released(name), 0.0)
                names.remove(name)
    assert not names and scheduler.pool.num_used == 0 and not scheduler.has_work
