"""Random histories of a router, a prefill and a decode worker: DESIGN section 9's invariants after every step.

Real schedulers, block pools and life cycles; the model, the links and the calls between them are simulated, and
everything that is under way waits until a rule delivers it, so that any order of events can happen. 10,000 steps.
"""

from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phasor.core.errors import CapacityError, InternalError
from phasor.core.request import SamplingParams
from phasor.router import lifecycle_events as le
from tests.helpers.simulated_router import SimulatedPair
from tests.helpers.simulated_workers import SimulatedWorker

PREFIXES = (tuple(range(20, 33)), (34, *range(21, 33)), tuple(range(40, 49)), (60, 61))
"""Prompts begin with one of these, cut anywhere, so that requests share blocks, or almost do: the second differs
from the first in one token of its first block only."""
SELDOM = st.sampled_from([False, False, False, True])
NUMBER = st.integers(0, 1000)
ROLES = st.sampled_from(["prefill", "decode"])


class Pair(RuleBasedStateMachine):
    pair: SimulatedPair
    broken_step: bool = False

    @initialize(num_prefill=st.integers(4, 8), num_decode=st.integers(7, 9))
    def begin(self, num_prefill: int, num_decode: int) -> None:
        self.pair = SimulatedPair(num_prefill, num_decode)

    # --- requests ----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.alive()) < 7)
    @rule(
        prefix=st.sampled_from(PREFIXES),
        cut=st.integers(1, 12),
        tail=st.lists(st.integers(70, 73), max_size=4),
        max_tokens=st.integers(1, 16),
        seed=st.integers(0, 2),
        ignore_eos=st.booleans(),
        local=st.sampled_from([False, False, True]),
        timeout_s=st.sampled_from([10.0, 1000.0, 1000.0]),
        num_choices=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def start(
        self,
        prefix: tuple[int, ...],
        cut: int,
        tail: list[int],
        max_tokens: int,
        seed: int,
        ignore_eos: bool,
        local: bool,
        timeout_s: float,
        num_choices: int,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos, num_choices=num_choices
        )
        self.pair.start((*prefix[:cut], *tail), sampling, local=local, timeout_s=timeout_s)

    @precondition(lambda self: self.alive())
    @rule(number=NUMBER, now=SELDOM)
    def client_leaves(self, number: int, now: bool) -> None:
        if now:
            self.pair.feed(self.pick(self.alive(), number), le.ClientGone(now_s=0))

    @precondition(lambda self: self.without_tokens())
    @rule(number=NUMBER, how=st.sampled_from(["client", "link", "prefill"]))
    def ends_in_the_hand_over(self, number: int, how: str) -> None:
        """Whoever waits at the decode worker is admitted, and one that has blocks reserved goes no further."""
        self.turn("decode", 1)
        for request in self.without_tokens():
            while request.events:
                self.pair.feed(request, request.events.popleft())
        receiving = [self.pair.requests[request_id] for request_id in self.pair.decode.scheduler._receiving]
        receiving = [request for request in receiving if not request.over]
        if not receiving:
            return
        request = self.pick(receiving, number)
        call = self.pair.prefill.calls.get(request.lifecycle.request_id)
        if how == "client" or call is None or call.transfer is None:
            self.pair.feed(request, le.ClientGone(now_s=0))
        elif how == "link":
            self.pair.break_transfer(call.transfer)
        else:
            self.turn("prefill", 3)
            self.pair.feed(request, le.ClientGone(now_s=0))

    @precondition(lambda self: self.without_tokens())
    @rule(number=NUMBER)
    def ends_while_it_is_admitted(self, number: int) -> None:
        """The call is closed, and the engine admits the request before it is told."""
        decode = self.pair.decode
        while decode.inbox:
            decode.take_event()
        waiting = [self.pair.requests[entry.seq.request_id] for entry in decode.scheduler._waiting]
        waiting = [request for request in waiting if not request.over]
        if waiting:
            self.pair.feed(self.pick(waiting, number), le.ClientGone(now_s=0))
        decode.step()

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.pair.let_time_pass(seconds)

    @precondition(lambda self: any(r.events for r in self.pair.requests.values()))
    @rule(number=NUMBER)
    def router_hears(self, number: int) -> None:
        request = self.pick([r for r in self.pair.requests.values() if r.events], number)
        self.pair.feed(request, request.events.popleft())

    # --- workers -----------------------------------------------------------------------------------------

    @rule(role=ROLES)
    def take_event(self, role: str) -> None:
        worker = self.worker(role)
        if worker.inbox:
            worker.take_event()

    @rule(role=ROLES, times=st.integers(1, 4))
    def turn(self, role: str, times: int) -> None:
        """As the engine's loop does: all events, then a step."""
        worker = self.worker(role)
        for _ in range(times):
            while worker.inbox:
                worker.take_event()
            worker.step()

    @rule(rounds=st.integers(1, 6))
    def all_goes_well(self, rounds: int) -> None:
        """Everything under way arrives, and both workers compute."""
        for _ in range(rounds):
            self.pair.move()

    @rule(rounds=st.integers(6, 12))
    def all_goes_well_for_long(self, rounds: int) -> None:
        for _ in range(rounds):
            self.pair.move()

    @rule(role=ROLES)
    def step(self, role: str) -> None:
        self.worker(role).step()

    @precondition(lambda self: self.pair.prefill.unsubmitted or self.pair.decode.unsubmitted)
    @rule(role=ROLES)
    def submit_release(self, role: str) -> None:
        worker: Any = self.worker(role)
        if worker.unsubmitted:
            worker.submit_release()

    @precondition(lambda self: len(self.alive()) > 2)
    @rule(role=ROLES, now=SELDOM)
    def a_step_fails(self, role: str, now: bool) -> None:
        if not now:
            return
        self.broken_step = True
        self.worker(role).fail_step()

    @precondition(lambda self: len(self.alive()) > 2)
    @rule(role=ROLES, now=SELDOM)
    def die(self, role: str, now: bool) -> None:
        if not now:
            return
        self.pair.restart(role)

    # --- links -------------------------------------------------------------------------------------------

    @precondition(lambda self: any(t.pushed for t in self.pair.prefill.transfers))
    @rule(number=NUMBER)
    def send(self, number: int) -> None:
        self.pair.prefill.send(self.pick([t for t in self.pair.prefill.transfers if t.pushed], number))

    @precondition(lambda self: any(t.staged for t in self.pair.prefill.transfers))
    @rule(number=NUMBER, damage=st.sampled_from([False] * 7 + [True]))
    def arrive(self, number: int, damage: bool) -> None:
        transfer = self.pick([t for t in self.pair.prefill.transfers if t.staged], number)
        self.pair.prefill.arrive(transfer, self.pair.decode, damage=damage)

    @precondition(lambda self: len(self.pair.prefill.calls) > 1)
    @rule(number=NUMBER, now=SELDOM)
    def link_breaks(self, number: int, now: bool) -> None:
        if not now:
            return
        transfers = [c.transfer for c in self.pair.prefill.calls.values() if c.transfer is not None]
        self.pair.break_transfer(self.pick(transfers, number))

    # --- what must hold ----------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.pair.check()

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.pair.settle()
        for request in self.pair.requests.values():
            if isinstance(request.end, le.Fail):
                error = request.end.error
                assert not isinstance(error, InternalError) or self.broken_step, error
                assert not (isinstance(error, CapacityError) and error.ever) or self.too_large(request)

    # --- helpers -----------------------------------------------------------------------------------------

    def alive(self) -> list[Any]:
        return [r for r in self.pair.requests.values() if not r.over]

    def without_tokens(self) -> list[Any]:
        return [request for request in self.alive() if not any(request.tokens)]

    def too_large(self, request: Any) -> bool:
        prefill, decode = self.pair.sizes
        total = len(request.prompt) + request.sampling.max_tokens - 1
        num_spare = request.sampling.num_choices - 1 if len(request.prompt) % 4 else 0
        num_prompt = -(-len(request.prompt) // 4)
        return total > decode * 4 or len(request.prompt) > prefill * 4 or num_prompt + num_spare > decode

    def worker(self, role: str) -> SimulatedWorker:
        return self.pair.prefill if role == "prefill" else self.pair.decode

    @staticmethod
    def pick(things: list[Any], number: int) -> Any:
        return things[number % len(things)]


TestPair = Pair.TestCase
TestPair.settings = settings(
    max_examples=130,
    stateful_step_count=80,
    derandomize=True,
    phases=(Phase.generate,),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
