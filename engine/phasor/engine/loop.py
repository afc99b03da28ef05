"""The engine thread: events in, steps computed, instructions carried out, until stopped.

The scheduler decides, the runner computes, `execute` acts; this file only takes turns. It owns the thread, and
with it the scheduler, the pool's tensors and the model: nothing else touches them while it runs.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Generic, Protocol, TypeVar

import torch

from phasor.core.clock import Clock, MonotonicClock
from phasor.core.errors import InternalError, PhasorError
from phasor.core.ids import RequestId
from phasor.core.request import TokenLogprobs
from phasor.engine.logit_rules import TokenDraw
from phasor.engine.logprobs import token_logprobs
from phasor.engine.runner import ModelRunner, SequenceSlice
from phasor.engine.sampling import sample
from phasor.engine.step import ChunkResult, ScheduledChunk

EventT = TypeVar("EventT")
EventT_contra = TypeVar("EventT_contra", contravariant=True)
InstructionT = TypeVar("InstructionT")

_IDLE_WAIT_S = 0.5

_log = logging.getLogger(__name__)


class Scheduler(Protocol[EventT_contra, InstructionT]):
    """What both workers' schedulers offer the loop."""

    @property
    def has_work(self) -> bool:
        """Whether `plan` may schedule something."""
        ...

    def handle(self, event: EventT_contra, now_s: float) -> list[InstructionT]:
        """Take in one event."""
        ...

    def plan(self, now_s: float) -> tuple[list[ScheduledChunk], list[InstructionT]]:
        """Choose the next step's chunks; the instructions are carried out before it is computed."""
        ...

    def complete(
        self, chunks: list[ScheduledChunk], results: list[ChunkResult], now_s: float
    ) -> list[InstructionT]:
        """Take in a computed step."""
        ...


class EngineLoop(Generic[EventT, InstructionT]):
    """Runs one worker's engine in a thread of its own.

    Args:
        scheduler: decides; used from the engine thread only, once started.
        runner: computes.
        eos_token_ids: what min_tokens forbids.
        execute: carries out one instruction in the engine thread; may return follow-up events, which are handled
            before the next step. Must not block.
        fail: called in the engine thread with the requests of a step that raised; returns the events that
            release them.
        on_idle: called in the engine thread whenever there is nothing left to do (the leak check).
        on_crash: called in the engine thread if it dies of a bug: the worker must report itself unhealthy.
        clock: where `now_s` comes from.
    """

    def __init__(
        self,
        scheduler: Scheduler[EventT, InstructionT],
        runner: ModelRunner,
        *,
        eos_token_ids: frozenset[int],
        execute: Callable[[InstructionT], Iterable[EventT]],
        fail: Callable[[list[RequestId], PhasorError], Iterable[EventT]],
        on_idle: Callable[[], None],
        on_crash: Callable[[PhasorError], None],
        clock: Clock | None = None,
    ) -> None:
        self._scheduler, self._runner, self._eos_token_ids = scheduler, runner, eos_token_ids
        self._execute, self._fail, self._on_idle = execute, fail, on_idle
        self._on_crash = on_crash
        self._clock = clock or MonotonicClock()
        self._inbox: queue.SimpleQueue[EventT | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phasor-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; call once."""
        self._thread.start()

    def submit(self, event: EventT) -> None:
        """Hand in an event from any thread; returns at once."""
        self._inbox.put(event)

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end after its current step; False if it has not within `timeout_s`."""
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs; a worker whose thread died is unhealthy."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._take_turns()
        except Exception as exc:  # The thread's top level: the process must learn that its engine is gone.
            _log.exception("the engine thread died")
            self._on_crash(InternalError(f"the engine died: {type(exc).__name__}: {exc}"))

    def _take_turns(self) -> None:
        progressed = False
        while not self._stopping.is_set():
            if not self._scheduler.has_work:
                self._on_idle()
            # Without progress only an event can change anything (a release makes room): wait for one.
            self._take_in_events(block=not progressed)
            chunks, instructions = self._scheduler.plan(self._clock.now_s())
            self._carry_out(instructions)
            progressed = bool(chunks)
            if chunks:
                self._step(chunks)

    def _take_in_events(self, *, block: bool) -> None:
        while True:
            try:
                event = self._inbox.get(block=block, timeout=_IDLE_WAIT_S)
            except queue.Empty:
                return
            if event is None:
                return
            self._carry_out(self._scheduler.handle(event, self._clock.now_s()))
            block = False

    def _carry_out(self, instructions: list[InstructionT]) -> None:
        pending = list(instructions)
        while pending:
            for event in self._execute(pending.pop(0)):
                pending.extend(self._scheduler.handle(event, self._clock.now_s()))

    def _step(self, chunks: list[ScheduledChunk]) -> None:
        try:
            results = self._compute(chunks)
        except Exception as exc:  # The loop's top level: one bad step fails its requests, not the worker.
            _log.exception("a step failed")
            ids = [chunk.seq.request_id for chunk in chunks]
            error = InternalError(f"computing a step failed: {type(exc).__name__}: {exc}")
            for event in self._fail(ids, error):
                self._carry_out(self._scheduler.handle(event, self._clock.now_s()))
            return
        self._carry_out(self._scheduler.complete(chunks, results, self._clock.now_s()))

    def _compute(self, chunks: list[ScheduledChunk]) -> list[ChunkResult]:
        logits = self._runner.step([_slice_of(chunk) for chunk in chunks])
        draws: list[TokenDraw] = []
        rows: list[int] = []
        prompts: list[tuple[TokenLogprobs, ...]] = []
        first = 0
        for chunk in chunks:
            num_rows = chunk.num_tokens if chunk.scores_prompt else int(chunk.samples)
            prompts.append(_prompt_logprobs(chunk, logits[first : first + num_rows]))
            first += num_rows
            if chunk.samples:
                # A token is a function of its request's seed and its position, never of the step it was made in.
                params = chunk.seq.sampling
                draws.extend(
                    TokenDraw(params.for_choice(index), chunk.seq.token_ids, chunk.seq.num_prompt)
                    for index in range(params.num_choices)
                )
                rows.extend([first - 1] * params.num_choices)
        if rows != list(range(len(logits))):
            logits = logits[rows]
        sampled = iter(sample(logits, draws, self._eos_token_ids) if draws else ())
        return [
            ChunkResult(
                tokens=tuple(islice(sampled, chunk.seq.sampling.num_choices if chunk.samples else 0)),
                prompt_logprobs=prompt,
            )
            for chunk, prompt in zip(chunks, prompts, strict=True)
        ]


def _slice_of(chunk: ScheduledChunk) -> SequenceSlice:
    seq = chunk.seq
    return SequenceSlice(
        token_ids=seq.token_ids[seq.num_computed : seq.num_computed + chunk.num_tokens],
        start=seq.num_computed,
        block_table=seq.blocks,
        needs_logits=chunk.samples,
        tier=seq.tier,
        all_logits=chunk.scores_prompt,
    )


def _prompt_logprobs(chunk: ScheduledChunk, logits: torch.Tensor) -> tuple[TokenLogprobs, ...]:
    """Score the prompt tokens that follow the chunk's positions."""
    num_top = chunk.seq.sampling.prompt_logprobs
    if not chunk.scores_prompt or num_top is None:
        return ()
    start = chunk.seq.num_computed + 1
    targets = chunk.seq.token_ids[start : min(start + chunk.num_tokens, chunk.seq.num_prompt)]
    return tuple(token_logprobs(logits[: len(targets)], targets, [num_top] * len(targets)))
