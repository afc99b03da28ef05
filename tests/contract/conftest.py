"""Every kind of link that the contract holds for, and the promise that no link thread outlives its test."""

from collections.abc import Iterator

import pytest

from phasor.transport.link import LinkFactory
from tests.helpers.transfers import TIMEOUT_S, link_threads


@pytest.fixture(params=["loopback", "gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def links(request: pytest.FixtureRequest) -> LinkFactory:
    """A factory of both ends, in this process."""
    if request.param == "loopback":
        from phasor.transport.loopback import LoopbackLinks

        return LoopbackLinks(TIMEOUT_S)
    if request.param == "gloo":
        from phasor.transport.gloo import GlooLinks

        return GlooLinks("127.0.0.1", TIMEOUT_S)
    from tests.helpers.nccl_pair import two_gpu_links

    return two_gpu_links(TIMEOUT_S)


@pytest.fixture(autouse=True)
def _no_link_thread_is_left() -> Iterator[None]:
    yield
    assert link_threads() == []
