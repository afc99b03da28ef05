"""Which workers a request goes to: least loaded first, from a snapshot.

Pure: no clock, no IO, no state. It deliberately does not know prefixes (a later issue).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from phasor.core.errors import CapacityError, WorkerLostError
from phasor.core.ids import Incarnation

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRef:
    """One worker process: an address alone would also mean the process that replaces it."""

    role: Role
    address: str
    incarnation: Incarnation

    def __str__(self) -> str:
        """Return how messages and logs name the worker."""
        return f"{self.role} worker {self.address} ({self.incarnation or 'unknown incarnation'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """What the router knows about one worker at one moment."""

    ref: WorkerRef
    why_not: str = ""
    """Why the worker may not be used now, as a sentence fragment; empty when it may."""
    in_flight: int = 0
    """Requests this router has sent to this incarnation and that have not ended."""
    num_running: int = 0
    """The worker's own count, a second old at most; includes other routers' requests."""
    num_waiting: int = 0
    """The worker's own count of requests that wait for room."""
    num_free_blocks: int = 0
    pool_tokens: int = 0
    """Tokens that the worker's whole KV pool holds."""
    max_model_len: int = 0
    """Tokens of the longest prompt that it reads; 0 while it has not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where one request goes."""

    decode: WorkerRef
    prefill: WorkerRef | None
    """None: the decode worker reads the prompt itself."""
    why_local: str = ""
    """Why there is no prefill worker in the choice; empty when there is one."""
    is_fallback: bool = False
    """True when prefill workers exist and this prompt should have gone to one, but none was usable."""


def choose(
    workers: Sequence[WorkerSnapshot],
    *,
    prompt_tokens: int,
    total_tokens: int,
    local_prefill_tokens: int,
    force_local: bool = False,
) -> Choice:
    """Choose a decode worker, and a prefill worker unless the decode worker is to read the prompt itself.

    Args:
        workers: every member, usable or not.
        prompt_tokens: length of the prompt.
        total_tokens: prompt plus max_tokens, which the decode worker's pool must be able to hold.
        local_prefill_tokens: prompts up to this long are read by the decode worker.
        force_local: the request itself asks for that.

    Raises:
        WorkerLostError: no decode worker is usable.
        CapacityError: usable decode workers exist, but no pool could ever hold the request (`ever` is set).
    """
    decode = _least_loaded_decode(workers, total_tokens)
    prefill_workers = [worker for worker in workers if worker.ref.role == "prefill"]
    if force_local:
        return Choice(decode=decode, prefill=None, why_local="the request asks for it")
    if not prefill_workers:
        return Choice(decode=decode, prefill=None, why_local="there is no prefill worker")
    if prompt_tokens <= local_prefill_tokens:
        why = f"{prompt_tokens} prompt tokens <= local_prefill_tokens {local_prefill_tokens}"
        return Choice(decode=decode, prefill=None, why_local=why)
    fitting = [worker for worker in prefill_workers if _can_read(worker, prompt_tokens)]
    if not fitting:
        why = f"no prefill worker for {prompt_tokens} tokens is usable: {_describe(prefill_workers)}"
        return Choice(decode=decode, prefill=None, why_local=why, is_fallback=True)
    return Choice(decode=decode, prefill=min(fitting, key=_load).ref)


def _least_loaded_decode(workers: Sequence[WorkerSnapshot], total_tokens: int) -> WorkerRef:
    decode_workers = [worker for worker in workers if worker.ref.role == "decode"]
    usable = [worker for worker in decode_workers if not worker.why_not]
    if not usable:
        raise WorkerLostError(
            f"no decode worker is ready: looked at {len(decode_workers)}: {_describe(decode_workers)}; "
            "wait until the health service says SERVING, or start one"
        )
    fitting = [worker for worker in usable if worker.pool_tokens >= total_tokens]
    if not fitting:
        largest = max(worker.pool_tokens for worker in usable)
        raise CapacityError(
            f"prompt plus max_tokens is {total_tokens} tokens and the largest KV pool of {len(usable)} "
            f"decode worker(s) holds {largest}; lower max_tokens or raise --kv-memory",
            ever=True,
        )
    return min(fitting, key=_load).ref


def _can_read(worker: WorkerSnapshot, prompt_tokens: int) -> bool:
    longest = min(worker.pool_tokens, worker.max_model_len or worker.pool_tokens)
    return not worker.why_not and prompt_tokens <= longest


def _load(worker: WorkerSnapshot) -> tuple[int, int, int, int, str]:
    """Order by our own count first: it is exact and now; the worker's own counts break ties."""
    return (
        worker.in_flight,
        worker.num_waiting,
        worker.num_running,
        -worker.num_free_blocks,
        worker.ref.address,
    )


def _describe(workers: Iterable[WorkerSnapshot]) -> str:
    parts = [f"{w.ref.address} ({w.why_not or _size(w)})" for w in workers]
    return ", ".join(parts) or "none is known"


def _size(worker: WorkerSnapshot) -> str:
    limit = f", max_model_len {worker.max_model_len}" if worker.max_model_len else ""
    return f"pool of {worker.pool_tokens} tokens{limit}"
