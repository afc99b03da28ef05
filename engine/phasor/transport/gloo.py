"""Links over gloo, for CPUs. Pages on a GPU pass through host memory."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from phasor.transport.link import Link
from phasor.transport.process_group import ProcessGroupLink, ProcessGroupLinks


class GlooLink(ProcessGroupLink):
    """A link over gloo. A thread stuck in `recv` on a silent peer is freed by the timeout only."""

    can_fence: ClassVar[bool] = False

    def _finish(self, work: Any) -> None:
        # Never with a timeout of its own: one that runs out closes the pair, so it is no way to poll.
        work.wait()


class GlooLinks(ProcessGroupLinks):
    """Opens links over gloo."""

    kind: ClassVar[str] = "gloo"

    def _join_group(self, store: Any, rank: int, link_id: str) -> Link:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = self._timeout
        group = dist.ProcessGroupGloo(PrefixStore(link_id, store), rank, 2, options)
        return GlooLink(group, 1 - rank, store, torch.device("cpu"))
