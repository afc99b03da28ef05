"""One end of a link: a two-rank pipe for tensors, used by one thread at a time.

Every end has a timeout, and a link that timed out once is dead for good (gloo closes the pair; facts/ray.md
section 4): it is closed and a new one is opened, which takes milliseconds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch

from phasor.core.errors import TransferError, TransferTimeoutError


class Link(Protocol):
    """A connected end. `send` and `recv` block the calling thread, at most for the link's timeout."""

    can_fence: ClassVar[bool]
    """Whether `close` frees a thread that is stuck in `recv` (NCCL's abort does, gloo's does not)."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send contiguous tensors in order.

        Raises:
            TransferTimeoutError: the other end was silent for the link's timeout.
            TransferError: the other end is gone.
        """
        ...

    def recv(self, tensors: Sequence[torch.Tensor]) -> None:
        """Receive into contiguous tensors, in order; raises as `send` does."""
        ...

    def close(self) -> None:
        """Drop the connection. Idempotent, never blocks."""
        ...


@contextmanager
def map_process_group_errors(what: str) -> Iterator[None]:
    """Turn what torch.distributed raises (bare RuntimeErrors, mostly) into TransferErrors."""
    try:
        yield
    except RuntimeError as exc:
        text = str(exc)
        if "imed out" in text or "imeout" in text:
            raise TransferTimeoutError(f"{what}: the other end fell silent") from exc
        raise TransferError(f"{what}: {text.splitlines()[0][:200]}") from exc
