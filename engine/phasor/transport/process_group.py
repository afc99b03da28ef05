"""Links over torch.distributed: gloo on CPUs, NCCL on GPUs. One process group, store and port per pair of workers.

No global group (`init_process_group`): one pair's death must not break another's. The prefill end hosts the
rendezvous store, on a free port of its own.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from phasor.core.errors import ConfigError
from phasor.transport.link import map_process_group_errors

PREFILL_RANK, DECODE_RANK = 0, 1


class GlooLink:
    """A link over gloo. A thread stuck in `recv` on a silent peer is freed by the timeout only."""

    can_fence: ClassVar[bool] = False

    def __init__(self, group: Any, peer_rank: int, store: Any) -> None:
        self._group, self._peer, self._store = group, peer_rank, store

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send each tensor in turn; see Link."""
        for tensor in tensors:
            with map_process_group_errors("sending pages"):
                self._group.send([tensor], self._peer, 0).wait()

    def recv(self, tensors: Sequence[torch.Tensor]) -> None:
        """Receive each tensor in turn; see Link."""
        for tensor in tensors:
            with map_process_group_errors("receiving pages"):
                self._group.recv([tensor], self._peer, 0).wait()

    def close(self) -> None:
        """Forget group and store; their sockets close with the last reference."""
        self._group = self._store = None


class NcclLink(GlooLink):
    """A link over NCCL: `close` aborts the communicator, which frees a stuck thread."""

    can_fence: ClassVar[bool] = True

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send each tensor in turn and wait until the device has."""
        super().send(tensors)
        torch.cuda.current_stream().synchronize()

    def recv(self, tensors: Sequence[torch.Tensor]) -> None:
        """Receive each tensor in turn and wait until the device has."""
        super().recv(tensors)
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Abort the communicator and forget it."""
        group = self._group
        super().close()
        if group is not None:
            group.abort()


def host_store(host: str, timeout_s: float) -> Any:
    """Open a rendezvous store on a free port of `host`; its `port` says which."""
    with map_process_group_errors(f"opening a rendezvous store on {host}"):
        return dist.TCPStore(host, 0, 2, True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(host: str, port: int, timeout_s: float) -> Any:
    """Connect to the prefill end's rendezvous store."""
    with map_process_group_errors(f"reaching the rendezvous store at {host}:{port}"):
        return dist.TCPStore(host, port, 2, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def open_link(kind: str, store: Any, link_id: str, rank: int, timeout_s: float, host: str) -> GlooLink:
    """Join the two-rank group of `link_id`; blocks until the other end joins, at most `timeout_s`."""
    prefix = dist.PrefixStore(link_id, store)
    timeout = timedelta(seconds=timeout_s)
    with map_process_group_errors(f"opening the {kind} link {link_id}"):
        if kind == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timeout
            return GlooLink(dist.ProcessGroupGloo(prefix, rank, 2, options), 1 - rank, store)
        if kind == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return NcclLink(dist.ProcessGroupNCCL(prefix, rank, 2, nccl), 1 - rank, store)
    raise ConfigError("transport.kind", kind, "must be 'gloo' or 'nccl'")
