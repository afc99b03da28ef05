"""Parts of the decode worker's shell that need neither a model nor a server."""

import pytest

from phasor.core.errors import WorkerLostError
from phasor.core.ids import Incarnation, RequestId
from phasor.decode_worker.messages import Admit, TicketGrant
from phasor.decode_worker.worker import DecodeWorker


@pytest.fixture
def worker() -> DecodeWorker:
    """One that was never started and knows no request."""
    bare = DecodeWorker.__new__(DecodeWorker)
    bare.incarnation, bare._num_claimed, bare._requests = Incarnation("inc-1"), 0, {}
    return bare


@pytest.mark.parametrize("grant", [None, TicketGrant(0, 3)])
def test_admission_of_a_call_that_has_just_ended_does_not_release_it_under_its_own_step(
    worker: DecodeWorker, grant: TicketGrant | None
) -> None:
    """The step that computes it is planned already; its own Released comes with the next events. No ticket either."""
    assert list(worker._admit(Admit(RequestId("gone"), 0, grant))) == []


def test_every_call_has_an_id_of_its_own_here(worker: DecodeWorker) -> None:
    first, second = worker.claim("mine", "inc-1"), worker.claim("mine", "")
    assert first != second and "mine" in first and "mine" in second
    with pytest.raises(WorkerLostError, match="inc-1, not inc-0"):
        worker.claim("mine", "inc-0")
