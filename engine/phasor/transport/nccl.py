"""Links over NCCL, between two GPUs (NCCL refuses the same one twice).

Order with compute: a link's thread works on its device's default stream, as the engine does, so pages are sent
after the kernels that wrote them.
"""

import os
import threading
import time
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from phasor.core.errors import ConfigError, TransferTimeoutError
from phasor.transport.link import Link
from phasor.transport.process_group import PREFILL_RANK, ProcessGroupLink, ProcessGroupLinks

_POLL_S = 0.0002


class NcclLink(ProcessGroupLink):
    """A link over NCCL: `close` aborts the communicator, which frees a stuck thread."""

    can_fence: ClassVar[bool] = True

    def __init__(
        self, group: Any, peer_rank: int, store: Any, device: torch.device, timeout: timedelta
    ) -> None:
        super().__init__(group, peer_rank, store, device)
        self._timeout_s = timeout.total_seconds()

    def close(self) -> None:
        """Abort the communicator, in a thread of its own: ncclCommAbort may take a while, `close` may not."""
        group = self._group
        super().close()
        if group is not None:
            threading.Thread(target=group.abort, name="phasor-nccl-abort", daemon=True).start()

    def _finish(self, work: Any) -> None:
        """Wait by polling an event: `synchronize` has no timeout, and a silent peer would hold us for ever."""
        # This only orders our stream behind NCCL's.
        work.wait()
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self.device))
        deadline_s = time.monotonic() + self._timeout_s
        while not done.query():
            self._open_group()
            if time.monotonic() > deadline_s:
                self.close()
                raise TransferTimeoutError("NCCL: the other end fell silent")
            time.sleep(_POLL_S)


class NcclLinks(ProcessGroupLinks):
    """Opens links over NCCL on `device` (this process's current one by default).

    Raises:
        ConfigError: this torch has no NCCL, or there is no GPU.
    """

    kind: ClassVar[str] = "nccl"

    def __init__(self, host: str, timeout_s: float, device: torch.device | None = None) -> None:
        super().__init__(host, timeout_s)
        if not hasattr(dist, "ProcessGroupNCCL") or not torch.cuda.is_available():
            raise ConfigError("transport.kind", "nccl", "needs a CUDA build of torch and a GPU; use 'gloo'")
        # The watchdog's ways to handle an error end in taking the whole process down. We abort by ourselves.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._device = device or torch.device("cuda", torch.cuda.current_device())

    def _join_group(self, store: Any, rank: int, link_id: str) -> Link:
        torch.cuda.set_device(self._device)
        options = dist.ProcessGroupNCCL.Options()
        # Later than our own deadline, so that we act first.
        options._timeout = self._timeout * 4
        group = dist.ProcessGroupNCCL(PrefixStore(link_id, store), rank, 2, options)
        link = NcclLink(group, 1 - rank, store, self._device, self._timeout)
        # NCCL makes its communicator with the first message: do it now, so that a failure is one of opening.
        greeting = torch.zeros(1, device=self._device)
        if rank == PREFILL_RANK:
            link.send([greeting])
        else:
            link.recv([greeting])
        return link
