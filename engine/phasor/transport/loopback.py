"""Links inside one process, for tests: the same contract, no sockets. Both ends take their factory from one hub."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from phasor.core.errors import TransferError, TransferTimeoutError
from phasor.transport.link import Link, Rendezvous


class _Pipe:
    """What the two ends share. As with gloo, a message is handed over when both ends are there for it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.offered: torch.Tensor | None = None
        self.closed = False


class LoopbackLink:
    """One end. `close` at either end frees the threads of both."""

    can_fence: ClassVar[bool] = True
    device: ClassVar[torch.device] = torch.device("cpu")

    def __init__(self, pipe: _Pipe, timeout_s: float) -> None:
        self._pipe, self._timeout_s = pipe, timeout_s

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Offer each tensor and wait until it was copied; see Link."""
        pipe = self._pipe
        for tensor in tensors:
            with pipe.changed:
                self._wait(lambda: pipe.offered is None)
                pipe.offered = tensor
                pipe.changed.notify_all()
                self._wait(lambda: pipe.offered is None)

    def recv(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy each tensor that the other end offers; see Link."""
        pipe = self._pipe
        for tensor in tensors:
            with pipe.changed:
                self._wait(lambda: pipe.offered is not None)
                offered, pipe.offered = pipe.offered, None
                assert offered is not None
                if offered.nbytes != tensor.nbytes:
                    raise TransferError(f"{offered.nbytes} bytes came where {tensor.nbytes} were expected")
                tensor.copy_(offered.reshape(tensor.shape))
                pipe.changed.notify_all()

    def close(self) -> None:
        """Close both ends."""
        with self._pipe.changed:
            self._pipe.closed = True
            self._pipe.offered = None
            self._pipe.changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        pipe = self._pipe
        if not pipe.changed.wait_for(lambda: pipe.closed or ready(), self._timeout_s):
            # As gloo does: a timeout closes the pair.
            self.close()
            raise TransferTimeoutError("loopback: the other end fell silent")
        if pipe.closed:
            raise TransferError("loopback: the link was closed")


class LoopbackLinks:
    """A LinkFactory whose prefill and decode ends meet in this object."""

    kind: ClassVar[str] = "loopback"

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._joined: dict[int, _Pipe] = {}
        self._ports = itertools.count(1)

    def host(self, link_id: str) -> Rendezvous:
        """Take a number that the decode end names to meet us; see LinkFactory."""
        port = next(self._ports)

        def connect() -> Link:
            with self._changed:
                if not self._changed.wait_for(lambda: port in self._joined, self._timeout_s):
                    raise TransferTimeoutError(f"loopback link {link_id}: nobody joined")
                return LoopbackLink(self._joined.pop(port), self._timeout_s)

        return Rendezvous("loopback", port, connect)

    def join(self, link_id: str, host: str, port: int) -> Link:
        """Meet the prefill end; see LinkFactory."""
        pipe = _Pipe()
        with self._changed:
            self._joined[port] = pipe
            self._changed.notify_all()
        return LoopbackLink(pipe, self._timeout_s)
