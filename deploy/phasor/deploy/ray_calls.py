"""Calls into Ray that always end: every wait here has a deadline, and nothing blocks the event loop.

Importing this does not import Ray: settings in the environment must be in place before that happens.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from phasor.core.errors import WorkerLostError

T = TypeVar("T")

CALL_TIMEOUT_S = 30.0
"""For calls that only touch Ray's own state (name an actor, make a placement group)."""


async def call(ref: Any, *, timeout_s: float, what: str) -> Any:
    """Await an ObjectRef.

    Args:
        ref: what `actor.method.remote()` returned.
        timeout_s: how long to wait; the remote call itself goes on after that.
        what: the call in words, for the message.

    Raises:
        WorkerLostError: no answer in time, or the actor is dead.
        Exception: whatever the remote method raised, as itself (not as Ray's wrapper of it).
    """
    import ray.exceptions

    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except TimeoutError as exc:
        raise WorkerLostError(f"{what}: no answer within {timeout_s:g} s") from exc
    except ray.exceptions.RayTaskError as exc:
        # Ray raises a class that is both its own and the cause's; callers want the cause alone.
        cause = getattr(exc, "cause", None)
        if isinstance(cause, Exception):
            raise cause from exc
        raise
    except ray.exceptions.RayActorError as exc:
        raise WorkerLostError(f"{what}: {first_line(exc)}") from exc


async def in_thread(function: Callable[[], T], *, timeout_s: float, what: str) -> T:
    """Run a blocking `function` in a thread of its own and wait for at most `timeout_s`.

    A daemon thread and not the loop's executor: some Ray calls hang for minutes (`ray.init` to a dead GCS
    hung for more than 600 s), and the process must still be able to end.

    Raises:
        WorkerLostError: `function` did not return in time. It keeps its thread.
        Exception: whatever `function` raised.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except BaseException as exc:
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop closed while we were stuck: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name=f"phasor: {what}", daemon=True).start()
    try:
        return await asyncio.wait_for(done, timeout_s)
    except TimeoutError as exc:
        raise WorkerLostError(f"{what}: no answer within {timeout_s:g} s") from exc


def first_line(exc: BaseException) -> str:
    """Return the first non-empty line of an exception's message (Ray's run over many lines)."""
    for line in str(exc).splitlines():
        if line.strip():
            return line.strip()
    return type(exc).__name__
