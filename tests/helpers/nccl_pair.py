"""Both ends of NCCL links in one process, each on a GPU of its own."""

import pytest
import torch

from phasor.transport.link import Link, LinkFactory, Rendezvous


class _TwoGpus:
    kind = "nccl"

    def __init__(self, prefill: LinkFactory, decode: LinkFactory) -> None:
        self._prefill, self._decode = prefill, decode

    def host(self, link_id: str) -> Rendezvous:
        return self._prefill.host(link_id)

    def join(self, link_id: str, host: str, port: int) -> Link:
        return self._decode.join(link_id, host, port)


def two_gpu_links(timeout_s: float) -> LinkFactory:
    """Return a factory whose prefill ends are on the first GPU and decode ends on the second."""
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs: it refuses the same one twice")
    from phasor.transport.nccl import NcclLinks

    prefill, decode = (NcclLinks("127.0.0.1", timeout_s, torch.device("cuda", index)) for index in (0, 1))
    return _TwoGpus(prefill, decode)
