"""What links over torch.distributed share: a rendezvous store per link, and a two-rank group that outlives no error.

There is no global group (`init_process_group`): one pair's death must not break another's. The prefill end hosts
the store, on a free port of its own, on its own address only.
"""

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from phasor.core.errors import TransferError
from phasor.transport.link import Link, Rendezvous, map_process_group_errors

PREFILL_RANK, DECODE_RANK = 0, 1


class ProcessGroupLink(ABC):
    """One rank of a two-rank process group.

    Args:
        group: a ProcessGroupGloo or ProcessGroupNCCL.
        peer_rank: the other end's rank.
        store: kept alive for as long as the group is in use.
        device: where tensors must lie.
    """

    def __init__(self, group: Any, peer_rank: int, store: Any, device: torch.device) -> None:
        self._group: Any = group
        self._store: Any = store
        self._peer_rank = peer_rank
        self.device = device

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send each tensor in turn; see Link."""
        for tensor in tensors:
            group = self._open_group()
            with map_process_group_errors("sending pages"):
                self._finish(group.send([tensor], self._peer_rank, 0))

    def recv(self, tensors: Sequence[torch.Tensor]) -> None:
        """Receive each tensor in turn; see Link."""
        for tensor in tensors:
            group = self._open_group()
            with map_process_group_errors("receiving pages"):
                self._finish(group.recv([tensor], self._peer_rank, 0))

    def close(self) -> None:
        """Forget group and store; their sockets close with the last reference, which a stuck thread may hold."""
        self._group = self._store = None

    @abstractmethod
    def _finish(self, work: Any) -> None:
        """Block until `work` is done, at most for the link's timeout."""

    def _open_group(self) -> Any:
        group = self._group
        if group is None:
            raise TransferError("this end of the link was closed")
        return group


class ProcessGroupLinks(ABC):
    """A LinkFactory over a rendezvous store.

    Args:
        host: the address of this worker's own ends.
        timeout_s: of every wait of a link, its opening included.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)

    @property
    @abstractmethod
    def kind(self) -> str:
        """See LinkFactory."""

    @abstractmethod
    def _join_group(self, store: Any, rank: int, link_id: str) -> Link:
        """Open one rank; blocks until the other one joins."""

    def host(self, link_id: str) -> Rendezvous:
        """Open a rendezvous store on a free port; see LinkFactory."""
        store, port = self._host_store()

        def connect() -> Link:
            with map_process_group_errors(
                f"waiting for the decode worker to join {self.kind} link {link_id}"
            ):
                return self._join_group(store, PREFILL_RANK, link_id)

        return Rendezvous(self._host, port, connect)

    def join(self, link_id: str, host: str, port: int) -> Link:
        """Reach the prefill end's store and join; see LinkFactory."""
        with map_process_group_errors(f"reaching the rendezvous store of {link_id} at {host}:{port}"):
            store = TCPStore(host, port, 2, False, timeout=self._timeout, wait_for_workers=False)
        with map_process_group_errors(f"joining {self.kind} link {link_id} at {host}:{port}"):
            return self._join_group(store, DECODE_RANK, link_id)

    def _host_store(self) -> tuple[Any, int]:
        """Return a store and its port. We bind the socket: TCPStore by itself would listen on every address."""
        what = f"opening a rendezvous store on {self._host}"
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as listening:
                listening.bind(address)
                listening.listen()
                port: int = listening.getsockname()[1]
                # From here on the descriptor is the store's.
                descriptor = listening.detach()
        except OSError as exc:
            raise TransferError(f"{what}: {exc}") from exc
        with map_process_group_errors(what):
            store = TCPStore(
                self._host,
                port,
                2,
                True,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
        return store, port
