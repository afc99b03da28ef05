"""One end of a link: a two-rank pipe for tensors, used by one thread at a time, and how two ends find each other.

Every end has a timeout, and a link that timed out once is dead for good (gloo closes the pair; facts/ray.md
section 4): it is closed and a new one is opened, which takes milliseconds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from phasor.core.errors import TransferError, TransferTimeoutError


class Link(Protocol):
    """A connected end. `send` and `recv` block the calling thread, at most for the link's timeout per tensor."""

    @property
    def can_fence(self) -> bool:
        """Whether `close` frees a thread that is stuck in `recv` (NCCL's abort does, gloo's does not)."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors of `send` and `recv` must lie."""
        ...

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send contiguous tensors in order; they may be changed once this returns or raises.

        Raises:
            TransferTimeoutError: the other end was silent for the link's timeout.
            TransferError: the other end is gone, or this end was closed.
        """
        ...

    def recv(self, tensors: Sequence[torch.Tensor]) -> None:
        """Receive into contiguous tensors of the sizes that are sent, in order; raises as `send` does."""
        ...

    def close(self) -> None:
        """Drop the connection. Any thread, idempotent, never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A place where the decode end is awaited. It is gone with the last reference to it and to its link."""

    host: str
    port: int
    connect: Callable[[], Link]
    """Blocks until the decode end has joined, at most for the link's timeout; raises as `send` does."""


class LinkFactory(Protocol):
    """Opens either end of links of one kind. Both calls block: make them in a thread."""

    @property
    def kind(self) -> str:
        """What the two ends must agree on, e.g. "gloo"."""
        ...

    def host(self, link_id: str) -> Rendezvous:
        """Prepare the prefill end of a link."""
        ...

    def join(self, link_id: str, host: str, port: int) -> Link:
        """Open the decode end of a link that is hosted at `host:port`; raises as `Link.send` does."""
        ...


@contextmanager
def map_process_group_errors(what: str) -> Iterator[None]:
    """Turn what torch.distributed raises (bare RuntimeErrors, mostly) into TransferErrors about `what`.

    Raises:
        TransferTimeoutError: the message speaks of a timeout; torch has no type for it.
        TransferError: any other RuntimeError, or ValueError about sizes.
    """
    try:
        yield
    except (RuntimeError, ValueError) as exc:
        text = str(exc).strip() or type(exc).__name__
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise TransferTimeoutError(f"{what}: the other end fell silent") from exc
        raise TransferError(f"{what}: {text.splitlines()[0][:200]}") from exc
