"""Workers that die or fall silent, clients that leave: a clear error in seconds, and nothing left behind."""

import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc
from tests.helpers.calls import generate, greedy
from tests.helpers.cluster import Cluster, cluster
from tests.helpers.models import TINY_FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ARGS = ("--kv-memory", "8MiB", "--block-tokens", "4", "--max-step-tokens", "16", "--transport-timeout", "2")
LONG = greedy(120, ignore_eos=True)
PROMPT = "def main():\n    "
FAILS_WITHIN_S = 5.0


@pytest.fixture
def fleet() -> Iterator[Cluster]:
    with cluster(TINY_FOLDER, num_prefill=2, num_decode=2, worker_args=ARGS) as running:
        yield running


class Stream:
    """A Generate call read in a thread; notes each delta and how it ended."""

    def __init__(self, address: str, prompt: str = PROMPT) -> None:
        self.channel = grpc.insecure_channel(address)
        request = pb.GenerateRequest(prompt=prompt, sampling=LONG, timeout_s=60)
        self.call = inference_pb2_grpc.InferenceStub(self.channel).Generate(request, timeout=60)
        self.first = threading.Event()
        self.finished: pb.Finished | None = None
        self.error: grpc.RpcError | None = None
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for response in self.call:
                self.first.set()
                if response.HasField("finished"):
                    self.finished = response.finished
        except grpc.RpcError as exc:
            self.error = exc
        finally:
            self.first.set()

    def end(self, timeout_s: float) -> float:
        """Wait for the end; returns the seconds it took."""
        started_s = time.monotonic()
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), f"the stream did not end within {timeout_s} s"
        self.channel.close()
        return time.monotonic() - started_s


def decode_of(fleet: Cluster) -> int:
    """Index of the decode worker that runs something."""
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        for index, process in enumerate(fleet.decode):
            if process.popen.poll() is None and fleet.counts(process).num_running:
                return index
        time.sleep(0.01)
    raise AssertionError("no decode worker runs anything")


def test_a_client_that_leaves_frees_everything(fleet: Cluster) -> None:
    for _ in range(5):
        stream = Stream(fleet.address)
        assert stream.first.wait(20)
        stream.call.cancel()
        stream.end(5)
        fleet.wait_baseline(*fleet.prefill, *fleet.decode)
    assert len(generate(fleet.address, PROMPT, greedy(4)).token_ids) == 4


def test_clients_that_leave_at_any_moment_do_not_disturb_the_next(fleet: Cluster) -> None:
    alone = generate(fleet.address, PROMPT, greedy(20)).token_ids
    for number in range(40):
        stream = Stream(fleet.address, PROMPT + "x" * number)
        time.sleep(0.002 * number)
        stream.call.cancel()
        if number % 8 == 0:
            assert generate(fleet.address, PROMPT, greedy(20)).token_ids == alone
        stream.end(5)
    fleet.wait_baseline(*fleet.prefill, *fleet.decode)


def test_a_killed_decode_worker_fails_its_request_clearly_and_the_other_serves_on(fleet: Cluster) -> None:
    stream = Stream(fleet.address)
    assert stream.first.wait(20)
    victim = decode_of(fleet)
    fleet.decode[victim].kill()
    assert stream.end(FAILS_WITHIN_S) < FAILS_WITHIN_S
    assert stream.finished is None and stream.error is not None
    assert stream.error.code() is grpc.StatusCode.UNAVAILABLE, stream.error.details()
    fleet.wait_baseline(*fleet.prefill, fleet.decode[1 - victim])
    for _ in range(4):
        assert len(generate(fleet.address, PROMPT, greedy(4)).token_ids) == 4


def test_a_silent_decode_worker_fails_its_request_within_seconds(fleet: Cluster) -> None:
    stream = Stream(fleet.address)
    assert stream.first.wait(20)
    victim = decode_of(fleet)
    fleet.decode[victim].freeze()
    try:
        assert stream.end(FAILS_WITHIN_S) < FAILS_WITHIN_S
        assert stream.error is not None and stream.error.code() is grpc.StatusCode.UNAVAILABLE
        fleet.wait_baseline(*fleet.prefill, fleet.decode[1 - victim])
        assert len(generate(fleet.address, PROMPT, greedy(4)).token_ids) == 4
    finally:
        fleet.decode[victim].thaw()
    fleet.wait_baseline(fleet.decode[victim], timeout_s=6.0)


def test_killed_prefill_workers_fail_their_request_and_leave_no_blocks_reserved() -> None:
    """Both prefill workers are frozen, so the request is in the hand-over when they die."""
    with cluster(TINY_FOLDER, num_prefill=1, num_decode=1, worker_args=ARGS) as fleet:
        expected = generate(fleet.address, PROMPT, greedy(12)).token_ids
        fleet.prefill[0].freeze()
        stream = Stream(fleet.address, PROMPT + "y" * 100)
        decode_of(fleet)
        fleet.prefill[0].kill()
        stream.end(FAILS_WITHIN_S)
        assert stream.finished is None and stream.error is not None
        assert stream.error.code() is grpc.StatusCode.UNAVAILABLE, stream.error.details()
        fleet.wait_baseline(*fleet.decode)
        assert expected


def test_a_silent_prefill_worker_fails_its_request_and_late_pages_reach_nobody() -> None:
    """A1: P is stopped in the hand-over, the request fails, P wakes up: D is unharmed and answers as before."""
    with cluster(TINY_FOLDER, num_prefill=1, num_decode=1, worker_args=ARGS) as fleet:
        expected = generate(fleet.address, PROMPT, greedy(12)).token_ids
        fleet.prefill[0].freeze()
        stream = Stream(fleet.address, PROMPT + "z" * 100)
        decode_of(fleet)
        stream.end(FAILS_WITHIN_S)
        assert stream.error is not None and stream.error.code() is grpc.StatusCode.UNAVAILABLE
        fleet.wait_baseline(*fleet.decode)
        fleet.prefill[0].thaw()
        fleet.wait_baseline(*fleet.prefill, timeout_s=6.0)
        deadline_s = time.monotonic() + 10
        while True:
            try:
                assert generate(fleet.address, PROMPT, greedy(12)).token_ids == expected
                break
            except grpc.RpcError:
                assert time.monotonic() < deadline_s, "the prefill worker was not taken back"
                time.sleep(0.2)
