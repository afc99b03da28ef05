"""A prefill worker whose links fail on demand: a subclass for tests, started like the real one.

    python -m tests.helpers.faulty_prefill_worker --faults DIR [options of phasor.prefill_worker]

Faults are files in DIR, so that a test can turn them on and off while the process runs:

    stall        while it exists, the link's thread waits before each block
    cut          holds a number n: before the n-th block from now on, the link's sockets are shut down under it
    flip         one bit of the next block is flipped behind its checksum
    deaf         while it exists, new links announce a port where nobody answers
"""

import os
import socket
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from phasor.engine.worker_main import run_worker
from phasor.prefill_worker.worker import PrefillWorker
from phasor.transport.link import Link, LinkFactory, Rendezvous

STALL_AT_MOST_S = 30.0


class FaultySend:
    """A link's prefill end."""

    can_fence = False

    def __init__(self, link: Link, faults: Path, sockets: set[int]) -> None:
        self._link, self._faults, self._sockets = link, faults, sockets
        self.device = link.device

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._stall()
            self._cut(tensor.shape[0])
            self._link.send([self._flipped(tensor)])

    def recv(self, tensors: Sequence[torch.Tensor]) -> None:
        self._link.recv(tensors)

    def close(self) -> None:
        self._link.close()

    def _stall(self) -> None:
        deadline_s = time.monotonic() + STALL_AT_MOST_S
        while (self._faults / "stall").exists() and time.monotonic() < deadline_s:
            time.sleep(0.005)

    def _cut(self, num_blocks: int) -> None:
        file = self._faults / "cut"
        if not file.exists():
            return
        left = int(file.read_text()) - num_blocks
        if left >= 0:
            file.write_text(str(left))
            return
        file.unlink()
        for number in self._sockets & open_sockets():
            with socket.socket(fileno=os.dup(number)) as doomed:
                try:
                    doomed.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def _flipped(self, tensor: torch.Tensor) -> torch.Tensor:
        file = self._faults / "flip"
        if not file.exists():
            return tensor
        file.unlink()
        damaged = tensor.clone()
        damaged.view(-1).view(torch.uint8)[5] ^= 1
        return damaged


class FaultyHost:
    """A LinkFactory around the worker's own."""

    def __init__(self, factory: LinkFactory, faults: Path) -> None:
        self._factory, self._faults = factory, faults
        self.kind = factory.kind
        self._silent: list[socket.socket] = []

    def host(self, link_id: str) -> Rendezvous:
        at = self._factory.host(link_id)
        if (self._faults / "deaf").exists():
            listening = socket.create_server(("127.0.0.1", 0))
            self._silent.append(listening)
            return Rendezvous(at.host, listening.getsockname()[1], at.connect)

        def connect() -> Link:
            before = open_sockets()
            link = at.connect()
            return FaultySend(link, self._faults, open_sockets() - before)

        return Rendezvous(at.host, at.port, connect)

    def join(self, link_id: str, host: str, port: int) -> Link:
        return self._factory.join(link_id, host, port)


class FaultyPrefillWorker(PrefillWorker):
    """The real one, over faulty links."""

    faults: Path

    def start_engine(self) -> None:
        super().start_engine()
        self._sender._factory = FaultyHost(self._sender._factory, self.faults)


def open_sockets() -> set[int]:
    """Descriptors of this process's connected TCP sockets."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            number = int(entry.name)
            if stat.S_ISSOCK(entry.stat().st_mode) and _is_connected(number):
                found.add(number)
        except OSError:
            continue
    return found


def _is_connected(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as other:
        if other.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            other.getpeername()
        except OSError:
            return False
        return True


if __name__ == "__main__":
    where = sys.argv.index("--faults")
    FaultyPrefillWorker.faults = Path(sys.argv[where + 1])
    del sys.argv[where : where + 2]
    sys.exit(run_worker(FaultyPrefillWorker, "faulty_prefill_worker"))
