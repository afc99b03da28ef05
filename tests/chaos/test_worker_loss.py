"""Workers that die or fall silent, clients that leave: a clear error in seconds, and nothing left behind."""

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.helpers.calls import generate, greedy
from tests.helpers.cluster import Cluster, Process, cluster, until
from tests.helpers.faults import FaultyCluster, faulty_cluster
from tests.helpers.models import TINY_FOLDER
from tests.helpers.streams import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ARGS = ("--kv-memory", "8MiB", "--block-tokens", "4", "--max-step-tokens", "16", "--transport-timeout", "2")
LONG = greedy(120, ignore_eos=True)
PROMPT = "def main():\n    "
FAILS_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Cluster]:
    """For what everybody survives."""
    with cluster(TINY_FOLDER, num_prefill=1, num_decode=2, worker_args=ARGS) as running:
        yield running


@pytest.fixture(scope="module")
def mortals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    """Each test of this fleet kills one; whoever runs alone finds all of them alive."""
    folder: Path = tmp_path_factory.mktemp("faults")
    with faulty_cluster(folder, num_prefill=1, num_decode=3, worker_args=ARGS) as running:
        yield running


def alive(processes: list[Process]) -> list[Process]:
    return [process for process in processes if process.popen.poll() is None]


def busy(running: Cluster) -> Process:
    """The decode worker that runs something."""
    found: list[Process] = []

    def look() -> bool:
        found[:] = [p for p in alive(running.decode) if running.counts(p).num_running]
        return bool(found)

    until(look, "a decode worker that runs something", timeout_s=5)
    return found[0]


def serves_again(address: str, prompt: str, expected: list[int]) -> None:
    """Wait until a prompt is answered; answers on the way there must be right, and refusals say UNAVAILABLE."""

    def ask() -> bool:
        try:
            assert generate(address, prompt, greedy(len(expected))).token_ids == expected
        except grpc.RpcError as exc:
            assert exc.code() is grpc.StatusCode.UNAVAILABLE, exc
            time.sleep(0.1)
            return False
        return True

    until(ask, "an answer", timeout_s=10)


def test_a_client_that_leaves_frees_everything(fleet: Cluster) -> None:
    """A11."""
    for _ in range(5):
        stream = Stream(fleet.address, PROMPT, LONG)
        assert stream.first.wait(20)
        stream.cancel()
        stream.end(5)
        fleet.wait_baseline(timeout_s=1.0)
    assert len(generate(fleet.address, PROMPT, greedy(4)).token_ids) == 4


def test_clients_that_leave_at_any_moment_do_not_disturb_the_next(fleet: Cluster) -> None:
    """B7, A8."""
    alone = generate(fleet.address, PROMPT, greedy(20)).token_ids
    for number in range(40):
        stream = Stream(fleet.address, PROMPT + "x" * number, LONG)
        time.sleep(0.002 * number)
        stream.cancel()
        if number % 8 == 0:
            assert generate(fleet.address, PROMPT, greedy(20)).token_ids == alone
        stream.end(5)
    fleet.wait_baseline()


def test_a_request_id_may_be_used_again_at_once(fleet: Cluster) -> None:
    """B7: a client that leaves and asks again under its own id is not told that the id is in use."""
    alone = generate(fleet.address, PROMPT, greedy(6)).token_ids
    for number in range(50):
        left = Stream(fleet.address, PROMPT + "u" * number, LONG, request_id="mine")
        if number % 2:
            assert left.first.wait(20)
        left.cancel()
        left.end(5)
        until(lambda: fleet.router_counts().num_in_flight == 0, "the router's end", timeout_s=5)
        again = Stream(fleet.address, PROMPT, greedy(6), request_id="mine")
        again.end(10)
        assert again.code is grpc.StatusCode.OK, (number, again.details)
        assert again.token_ids == alone
    fleet.wait_baseline()


def test_a_silent_decode_worker_fails_its_request_within_seconds(fleet: Cluster) -> None:
    """B3, D3."""
    stream = Stream(fleet.address, PROMPT, LONG)
    assert stream.first.wait(20)
    victim = busy(fleet)
    others = [process for process in fleet.workers if process is not victim]
    victim.freeze()
    try:
        assert stream.end(FAILS_WITHIN_S) < FAILS_WITHIN_S
        assert stream.code is grpc.StatusCode.UNAVAILABLE, stream.details
        fleet.wait_baseline(*others)
        assert len(generate(fleet.address, PROMPT, greedy(4)).token_ids) == 4
    finally:
        victim.thaw()
    fleet.wait_baseline(timeout_s=6.0)


def test_silent_prefill_workers_fail_their_request_and_late_pages_reach_nobody(fleet: Cluster) -> None:
    """A1: P is stopped in the hand-over, the request fails, P wakes up: D is unharmed and answers as before."""
    expected = generate(fleet.address, PROMPT, greedy(12)).token_ids
    for process in fleet.prefill:
        process.freeze()
    try:
        stream = Stream(fleet.address, PROMPT + "z" * 100, LONG)
        busy(fleet)
        stream.end(FAILS_WITHIN_S)
        assert stream.code is grpc.StatusCode.UNAVAILABLE, stream.details
        fleet.wait_baseline(*fleet.decode)
    finally:
        for process in fleet.prefill:
            process.thaw()
    fleet.wait_baseline(timeout_s=6.0)
    serves_again(fleet.address, PROMPT, expected)


def test_a_client_that_leaves_while_its_prefill_worker_is_silent(fleet: Cluster) -> None:
    """A1: the client goes, nobody waits for P; what P sends when it wakes lands nowhere."""
    prompt = PROMPT + "w" * 60
    expected = generate(fleet.address, prompt[::-1], greedy(12)).token_ids
    for process in fleet.prefill:
        process.freeze()
    try:
        stream = Stream(fleet.address, prompt, LONG)
        busy(fleet)
        stream.cancel()
        stream.end(2)
        fleet.wait_baseline(*fleet.decode)
    finally:
        for process in fleet.prefill:
            process.thaw()
    fleet.wait_baseline(timeout_s=6.0)
    serves_again(fleet.address, prompt[::-1], expected)


def test_a_decode_worker_killed_while_it_writes(mortals: FaultyCluster) -> None:
    running = mortals.cluster
    stream = Stream(running.address, PROMPT, LONG)
    assert stream.first.wait(20)
    busy(running).kill()
    assert stream.end(FAILS_WITHIN_S) < FAILS_WITHIN_S
    assert stream.code is grpc.StatusCode.UNAVAILABLE, stream.details
    running.wait_baseline(*running.prefill, *alive(running.decode))
    for _ in range(4):
        assert len(generate(running.address, PROMPT, greedy(4)).token_ids) == 4


def test_a_decode_worker_killed_in_the_hand_over(mortals: FaultyCluster) -> None:
    """B12: P is at its baseline within seconds. B6: requests that are sent right then end in seconds too."""
    running = mortals.cluster
    mortals.faults.put("stall")
    stream = Stream(running.address, PROMPT + "v" * 100, LONG)
    mortals.until_counts(running.prefill[0], lambda c: c.num_open_tickets == 1, "its hand-over")
    busy(running).kill()
    mortals.faults.lift("stall")
    others = [Stream(running.address, PROMPT + str(number), greedy(4)) for number in range(8)]
    for one in [stream, *others]:
        assert one.end(FAILS_WITHIN_S) < FAILS_WITHIN_S
        assert one.code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE), one.details
    running.wait_baseline(*running.prefill, *alive(running.decode))
    assert len(generate(running.address, PROMPT, greedy(4)).token_ids) == 4


def test_a_prefill_worker_killed_in_the_hand_over(mortals: FaultyCluster) -> None:
    """B3: its decode worker gives the blocks back at once; then decode workers read prompts themselves."""
    running = mortals.cluster
    expected = generate(running.address, PROMPT, greedy(12)).token_ids
    running.prefill[0].freeze()
    stream = Stream(running.address, PROMPT + "y" * 100, LONG)
    busy(running)
    running.prefill[0].kill()
    stream.end(FAILS_WITHIN_S)
    assert stream.code is grpc.StatusCode.UNAVAILABLE, stream.details
    running.wait_baseline(*alive(running.decode))
    serves_again(running.address, PROMPT, expected)
