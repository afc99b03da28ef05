"""The decode scheduler without tensors: events in, instructions out."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasor.core.config import SchedulerConfig
from phasor.core.errors import CapacityError, TransferError
from phasor.core.ids import BlockKey, RequestId
from phasor.core.request import FinishReason, SampledToken, SamplingParams
from phasor.decode_worker.messages import (
    Admit,
    Arrived,
    ChunkArrived,
    EmitToken,
    Fail,
    Instruction,
    PlacePages,
    RejectPages,
    Released,
    RevokeTicket,
    TicketGrant,
    TransferBroken,
)
from phasor.decode_worker.scheduler import DecodeScheduler
from phasor.engine.blocks import BlockPool
from phasor.engine.step import ChunkResult

BLOCK = 4
EOS = 7


@dataclass
class Rig:
    """A scheduler with a stand-in for the model: the next token is a function of the tokens so far."""

    num_blocks: int = 17
    config: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(max_step_tokens=8, max_running=4, max_waiting=8)
    )

    def __post_init__(self) -> None:
        pool = BlockPool(self.num_blocks, BLOCK)
        self.scheduler = DecodeScheduler(self.config, pool, BlockKey(bytes(32)), frozenset({EOS}), 1000)
        self.seen: list[Instruction] = []
        self.replies: dict[str, list[int]] = {}

    def tell(self, event: Arrived | ChunkArrived | TransferBroken | Released) -> list[Instruction]:
        return self.note(self.scheduler.handle(event, 0.0))

    def step(self) -> list[Instruction]:
        chunks, before = self.scheduler.plan(0.0)
        assert sum(c.num_tokens for c in chunks) <= self.config.max_step_tokens
        for chunk in chunks:
            held = len(chunk.seq.blocks) * BLOCK
            assert chunk.seq.num_computed + chunk.num_tokens <= held, "a position without a slot"
        results = [
            ChunkResult((SampledToken(next_token(c.seq.token_ids)),) * c.seq.sampling.num_choices)
            if c.samples
            else ChunkResult()
            for c in chunks
        ]
        return self.note([*before, *self.scheduler.complete(chunks, results, 0.0)])

    def note(self, instructions: list[Instruction]) -> list[Instruction]:
        self.scheduler.pool.check()
        for instruction in instructions:
            if isinstance(instruction, EmitToken):
                self.replies.setdefault(instruction.request_id, []).append(instruction.token.token_id)
        self.seen.extend(instructions)
        return instructions

    def of(self, kind: type[Instruction]) -> list[Instruction]:
        return [i for i in self.seen if isinstance(i, kind)]


def next_token(tokens: list[int]) -> int:
    return 10 + (sum(tokens) * 31 + len(tokens)) % 89


def arrived(
    name: str, tokens: list[int], *, local: bool = True, max_tokens: int = 5, **sampling: object
) -> Arrived:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Arrived(
        request_id=RequestId(name), token_ids=tuple(tokens), sampling=params, tier=1.0, local_prefill=local
    )


def chunk(name: str, first: int, count: int, token: int | None = None, num_tokens: int = 0) -> ChunkArrived:
    return ChunkArrived(
        request_id=RequestId(name),
        first_block=first,
        num_blocks=count,
        pages="pages",
        acknowledge="ack",
        first_tokens=() if token is None else (SampledToken(token),),
        num_tokens=num_tokens,
    )


def expected_reply(tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    start = len(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[start:]


def test_a_prompt_read_here_is_chunked_then_decoded() -> None:
    rig = Rig()
    prompt = list(range(10, 28))
    rig.tell(arrived("a", prompt, max_tokens=4))
    for _ in range(6):
        rig.step()
    assert rig.replies["a"] == expected_reply(prompt, 4)
    last = rig.of(EmitToken)[-1]
    assert isinstance(last, EmitToken) and last.finish is FinishReason.LENGTH
    assert (last.usage.completion_tokens, last.usage.decode_computed_tokens) == (4, 18)
    assert rig.scheduler.pool.num_used == 0 and not rig.scheduler.has_work


def test_received_pages_are_placed_and_the_first_token_starts_decoding() -> None:
    rig = Rig()
    prompt = list(range(10, 19))
    rig.tell(arrived("a", prompt, local=False, max_tokens=3))
    (admit,) = rig.step()
    assert admit == Admit(RequestId("a"), 0, TicketGrant(0, 3))
    assert rig.tell(chunk("a", 0, 2)) == [PlacePages([1, 2], "pages", "ack")]
    placed, emitted = rig.tell(chunk("a", 2, 1, token=next_token(prompt), num_tokens=9))
    assert placed == PlacePages([3], "pages", "ack")
    assert isinstance(emitted, EmitToken) and emitted.usage.transferred_tokens == 9
    rig.step()
    rig.step()
    assert rig.replies["a"] == expected_reply(prompt, 3)
    assert rig.of(RevokeTicket) == [RevokeTicket(RequestId("a"))]
    assert rig.scheduler.pool.num_used == 0


def test_a_prefix_held_here_is_not_asked_for() -> None:
    rig = Rig()
    rig.tell(arrived("a", list(range(10, 18)), max_tokens=1))
    rig.step()
    rig.tell(arrived("b", [*range(10, 18), 60], local=False))
    (admit,) = rig.step()
    assert admit == Admit(RequestId("b"), 8, TicketGrant(2, 1))


def test_chunks_that_do_not_fit_end_the_request_and_free_its_blocks() -> None:
    for bad in (
        chunk("a", 1, 1),
        chunk("a", 0, 4),
        chunk("a", 0, 2, token=9, num_tokens=9),
        chunk("a", 0, 3, 9, 8),
    ):
        rig = Rig()
        rig.tell(arrived("a", list(range(10, 19)), local=False))
        rig.step()
        rejected, revoked, failed = rig.tell(bad)
        assert isinstance(rejected, RejectPages) and isinstance(revoked, RevokeTicket)
        assert isinstance(failed, Fail) and isinstance(failed.error, TransferError)
        assert rig.scheduler.pool.num_used == 0


def test_pages_for_an_ended_request_are_turned_away() -> None:
    rig = Rig()
    rig.tell(arrived("a", list(range(10, 19)), local=False))
    rig.step()
    assert rig.tell(Released(RequestId("a"))) == [RevokeTicket(RequestId("a"))]
    assert [type(i) for i in rig.tell(chunk("a", 0, 3, token=9, num_tokens=9))] == [RejectPages]
    assert rig.tell(Released(RequestId("a"))) == []


def test_a_broken_transfer_fails_only_its_request() -> None:
    rig = Rig()
    rig.tell(arrived("a", list(range(10, 19)), local=False))
    rig.tell(arrived("b", list(range(30, 35)), max_tokens=2))
    rig.step()
    error = TransferError("silent")
    assert rig.tell(TransferBroken(RequestId("a"), error)) == [
        RevokeTicket(RequestId("a")),
        Fail(RequestId("a"), error),
    ]
    rig.step()
    assert rig.replies["b"] == expected_reply(list(range(30, 35)), 2)
    assert rig.tell(TransferBroken(RequestId("b"), error)) == []


def test_eos_and_stop_tokens_end_a_reply_unless_told_otherwise() -> None:
    prompt = [1, 2, 3]
    for sampling, finished in (({}, True), ({"ignore_eos": True}, False), ({"stop_token_ids": (EOS,)}, True)):
        rig = Rig()
        rig.tell(arrived("a", prompt, local=False, **sampling))
        rig.step()
        emitted = rig.tell(chunk("a", 0, 1, token=EOS, num_tokens=3))[1]
        assert isinstance(emitted, EmitToken)
        assert emitted.finish is (FinishReason.STOP if finished else None)
        assert (rig.scheduler.pool.num_used == 0) is finished


def test_a_request_that_can_never_fit_is_refused_for_ever() -> None:
    rig = Rig(num_blocks=4)
    (failed,) = rig.tell(arrived("a", list(range(8)), max_tokens=6))
    assert isinstance(failed, Fail) and isinstance(failed.error, CapacityError) and failed.error.ever
    assert rig.tell(arrived("b", list(range(8)), max_tokens=5)) == []


def test_pressure_preempts_the_youngest_and_changes_no_answer() -> None:
    rig = Rig(num_blocks=9)
    prompts = {"a": [11, 12, 13], "b": [21, 22, 23], "c": [31, 32, 33]}
    for name, prompt in prompts.items():
        rig.tell(arrived(name, prompt, max_tokens=20))
    for _ in range(200):
        rig.step()
    assert rig.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert rig.replies[name] == expected_reply(prompt, 20), name
    preempted = {
        i.request_id: i.usage.num_preemptions for i in rig.seen if isinstance(i, EmitToken) and i.finish
    }
    assert preempted["a"] == 0 and preempted["c"] > 0
    assert sum(isinstance(i, Admit) for i in rig.seen) == 3, "admission is announced once"
    assert rig.scheduler.pool.num_used == 0


def test_who_is_preempted_later_does_not_overtake_an_older_one() -> None:
    """`c` keeps its blocks reserved throughout, so first `a`, then `b` alone beside it runs out of blocks."""
    rig = Rig(num_blocks=10)
    prompts = {"a": list(range(10, 22)), "b": list(range(30, 38)), "c": list(range(50, 61))}
    rig.tell(arrived("a", prompts["a"], max_tokens=20))
    rig.tell(arrived("b", prompts["b"], local=False, max_tokens=20))
    rig.tell(arrived("c", prompts["c"], local=False, max_tokens=2))
    for _ in range(8):
        rig.step()
    assert rig.scheduler.num_preemptions == 1 and rig.scheduler.num_waiting == 1
    rig.tell(chunk("b", 0, 2, next_token(prompts["b"]), 8))
    while rig.scheduler.num_preemptions == 1:
        rig.step()
    assert [name for name, _ in rig.scheduler._running] == ["a"], (
        "b's blocks are for a, which has waited longer"
    )
    rig.tell(chunk("c", 0, 3, next_token(prompts["c"]), 11))
    for _ in range(60):
        rig.step()
    for name, length in (("a", 20), ("b", 20), ("c", 2)):
        assert rig.replies[name] == expected_reply(prompts[name], length), name
    assert rig.scheduler.pool.num_used == 0


@pytest.mark.parametrize("state", ["waiting", "receiving", "reading", "running", "preempted", "finished"])
def test_a_release_frees_once_in_any_state_and_again_changes_nothing(state: str) -> None:
    rig = Rig(num_blocks=10)
    prompt = list(range(10, 22))
    rig.tell(arrived("a", prompt, local=state != "receiving", max_tokens=2 if state == "finished" else 9))
    for _ in range({"waiting": 0, "receiving": 1, "reading": 1, "finished": 3}.get(state, 3)):
        rig.step()
    if state == "preempted":
        rig.scheduler._preempt(rig.scheduler._running[(RequestId("a"), 0)])
    rig.tell(arrived("other", list(range(50, 59)), max_tokens=3))
    revoked = rig.tell(Released(RequestId("a")))
    assert revoked == ([RevokeTicket(RequestId("a"))] if state == "receiving" else [])
    used, free = rig.scheduler.pool.num_used, rig.scheduler.pool.num_free
    assert used == 0
    for event in (
        Released(RequestId("a")),
        TransferBroken(RequestId("a"), TransferError("late")),
        Released(RequestId("nobody")),
    ):
        assert rig.tell(event) == []
        assert (rig.scheduler.pool.num_used, rig.scheduler.pool.num_free) == (used, free)
    assert [type(i) for i in rig.tell(chunk("a", 0, 3, 9, 12))] == [RejectPages]
    for _ in range(6):
        rig.step()
    assert rig.replies["other"] == expected_reply(list(range(50, 59)), 3)
    assert rig.scheduler.pool.num_used == 0 and not rig.scheduler.has_work


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ALssstr"), st.integers(0, 5), st.integers(1, 20)), max_size=80),
    st.integers(8, 20),
)
def test_any_history_gives_the_same_answers_and_returns_everything(
    events: list[tuple[str, int, int]], num_blocks: int
) -> None:
    """Random arrivals (local and remote), steps, transfers and releases; replies are prefixes of the solo reply."""
    rig = Rig(num_blocks=num_blocks)
    prompts: dict[str, list[int]] = {}
    grants: dict[str, TicketGrant] = {}

    def transfer(name: str) -> None:
        grant = grants.pop(name)
        tokens = prompts[name]
        rig.tell(chunk(name, grant.first_block, grant.num_blocks, next_token(tokens), len(tokens)))

    def admit(instructions: list[Instruction]) -> None:
        grants.update({i.request_id: i.grant for i in instructions if isinstance(i, Admit) and i.grant})

    for number, (what, which, length) in enumerate(events):
        if what in "AL":
            name = f"r{number}"
            prompts[name] = [which + 10] * (length // 2) + list(range(10, 11 + length // 2))
            rig.tell(arrived(name, prompts[name], local=what == "L", max_tokens=1 + which * 2))
        elif what == "s":
            admit(rig.step())
        elif what == "t" and grants:
            transfer(sorted(grants)[which % len(grants)])
        elif what == "r" and prompts:
            name = sorted(prompts)[which % len(prompts)]
            rig.tell(Released(RequestId(name)))
            grants.pop(name, None)
    for _ in range(400):
        for name in list(grants):
            transfer(name)
        if not rig.scheduler.has_work:
            break
        admit(rig.step())
    assert not rig.scheduler.has_work, "something never finished"
    assert rig.scheduler.pool.num_used == 0
    for name, reply in rig.replies.items():
        assert reply == expected_reply(prompts[name], len(reply)), name
