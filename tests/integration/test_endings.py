"""Every ending of a request on real workers, again and again: each count of P, D and router returns to its baseline.

Limits too: a refusal is an ending. Workers dying is in tests/chaos; the router's part, with fake workers and every
moment of a request's life, in test_router_endings.py.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import grpc
import pytest

from phasor.v1 import inference_pb2 as pb
from phasor.v1 import worker_pb2, worker_pb2_grpc
from tests.helpers.calls import generate, greedy
from tests.helpers.cluster import ROOT
from tests.helpers.faults import FaultyCluster, faulty_cluster
from tests.helpers.streams import Stream

pytestmark = pytest.mark.timeout(120)

ARGS = (
    *("--kv-memory", "400KiB", "--block-tokens", "4", "--max-model-len", "160", "--max-step-tokens", "16"),
    *("--transport-timeout", "5"),
)
PROMPT = "def read(self, path):\n    "
TIMES = 3


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    with faulty_cluster(
        tmp_path_factory.mktemp("faults"),
        worker_args=ARGS,
        prefill_args=("--max-running", "1", "--max-waiting", "1", "--max-model-len", "120"),
        decode_args=("--max-running", "3", "--max-waiting", "2"),
    ) as started:
        yield started


def prompt(number: int, length: int = 40) -> list[int]:
    """A prompt that shares no block with those of other numbers."""
    text = f"{number:03}:" + "if value is None:\n    return self.values[key]\n" * 4
    return list(text.encode())[:length]


def prefilling(running: FaultyCluster, number: int, **options: object) -> Stream:
    """A request whose pages are held up on their way."""
    running.faults.put("stall")
    stream = Stream(running.address, prompt(number), greedy(40), **options)  # type: ignore[arg-type]
    running.until_counts(running.cluster.prefill[0], lambda c: c.num_running == 1, "its prefill")
    return stream


# --- endings -------------------------------------------------------------------------------------------------


def finished(running: FaultyCluster, number: int) -> None:
    reply = generate(running.address, prompt(number), greedy(9))
    assert reply.finished is not None and reply.finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert len(reply.token_ids) == 9


def stop_string(running: FaultyCluster, number: int) -> None:
    whole = generate(running.address, PROMPT, greedy(24)).text
    reply = generate(running.address, PROMPT, greedy(24, stop=[whole[6:9]]))
    assert reply.finished is not None and reply.finished.finish_reason == pb.FINISH_REASON_STOP
    assert reply.text == whole[: whole.index(whole[6:9])]


def end_of_text_first(running: FaultyCluster, number: int) -> None:
    first = generate(running.address, PROMPT, greedy(1)).token_ids[0]
    reply = generate(running.address, PROMPT, greedy(24, stop_token_ids=[first]))
    assert reply.finished is not None and reply.finished.finish_reason == pb.FINISH_REASON_STOP
    assert reply.text == "" and reply.usage.completion_tokens == 1


def one_token(running: FaultyCluster, number: int) -> None:
    reply = generate(running.address, prompt(number), greedy(1))
    assert len(reply.token_ids) == reply.usage.completion_tokens == 1
    assert reply.finished is not None and reply.finished.finish_reason == pb.FINISH_REASON_LENGTH


def shorter_than_a_block(running: FaultyCluster, number: int) -> None:
    assert generate(running.address, [65 + number % 26], greedy(3)).usage.completion_tokens == 3


def equal_to_a_cached_one(running: FaultyCluster, number: int) -> None:
    replies = [generate(running.address, prompt(7, 4 * 9), greedy(5)).token_ids for _ in range(2)]
    assert replies[0] == replies[1]


def left_in_the_queue(running: FaultyCluster, number: int) -> None:
    ahead = prefilling(running, number)
    behind = Stream(running.address, prompt(number + 1), greedy(40))
    running.until_counts(running.cluster.prefill[0], lambda c: c.num_waiting == 1, "the queue")
    behind.cancel()
    behind.end(5)
    running.until_counts(running.cluster.prefill[0], lambda c: c.num_waiting == 0, "the queue's end")
    running.faults.lift("stall")
    ahead.end(10)
    assert ahead.code is grpc.StatusCode.OK, ahead.details


def left_in_prefill(running: FaultyCluster, number: int) -> None:
    stream = prefilling(running, number)
    stream.cancel()
    stream.end(5)
    assert stream.code is grpc.StatusCode.CANCELLED


def left_in_decode(running: FaultyCluster, number: int) -> None:
    stream = Stream(running.address, prompt(number), greedy(110))
    assert stream.first.wait(10)
    stream.cancel()
    stream.end(5)


def left_with_several_replies(running: FaultyCluster, number: int) -> None:
    """A13, H4: three replies to one prompt, left in the hand-over, after the fork, and not at all."""
    sampling = pb.SamplingParams(temperature=1.0, seed=number, max_tokens=40, n=3, ignore_eos=True)
    running.faults.put("stall")
    stream = Stream(running.address, prompt(number, 41), sampling)
    running.until_counts(running.cluster.prefill[0], lambda c: c.num_running == 1, "its prefill")
    stream.cancel()
    stream.end(5)
    running.faults.lift("stall")
    stream = Stream(running.address, prompt(number, 41), sampling)
    assert stream.first.wait(10)
    stream.cancel()
    stream.end(5)
    stream = Stream(running.address, prompt(number, 41), sampling)
    stream.end(20)
    assert stream.code is grpc.StatusCode.OK and len(stream.token_ids) == 3 * 40, stream.details


def deadline_in_prefill(running: FaultyCluster, number: int) -> None:
    stream = prefilling(running, number, timeout_s=0.6)
    stream.end(5)
    assert stream.code is grpc.StatusCode.DEADLINE_EXCEEDED, stream.details


def deadline_in_decode(running: FaultyCluster, number: int) -> None:
    stream = Stream(running.address, prompt(number), greedy(110, ignore_eos=True), timeout_s=0.06)
    stream.end(5)
    assert stream.code is grpc.StatusCode.DEADLINE_EXCEEDED, (stream.code, len(stream.token_ids))


def broken_transfer(running: FaultyCluster, number: int) -> None:
    running.faults.put("cut", "1")
    stream = Stream(running.address, prompt(number), greedy(40))
    stream.end(5)
    assert stream.code is grpc.StatusCode.UNAVAILABLE, stream.details


def never_fits(running: FaultyCluster, number: int) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(running.address, prompt(number, 159), greedy(2))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def client_killed(running: FaultyCluster, number: int) -> None:
    """A11: the client's process is gone, without a word."""
    program = (
        "import sys; from phasor.client import Client\n"
        "for event in Client(sys.argv[1]).generate('x = ', max_tokens=150, temperature=0): print(1, flush=True)"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", program, running.address], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert client.stdout is not None
    assert client.stdout.readline()
    client.send_signal(signal.SIGKILL)
    client.wait(10)
    client.stdout.close()


ENDINGS: list[Callable[[FaultyCluster, int], None]] = [
    finished,
    stop_string,
    end_of_text_first,
    one_token,
    shorter_than_a_block,
    equal_to_a_cached_one,
    left_in_the_queue,
    left_in_prefill,
    left_in_decode,
    left_with_several_replies,
    deadline_in_prefill,
    deadline_in_decode,
    broken_transfer,
    never_fits,
    client_killed,
]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_everything_is_back_after(
    running: FaultyCluster, ending: Callable[[FaultyCluster, int], None]
) -> None:
    """Invariant 7; A2, A5, A11, B2, B9."""
    probe = generate(running.address, PROMPT, greedy(8)).token_ids
    for time in range(TIMES):
        try:
            ending(running, 10 * ENDINGS.index(ending) + 2 * time)
        finally:
            running.faults.lift_all()
        running.cluster.wait_baseline()
    assert generate(running.address, PROMPT, greedy(8)).token_ids == probe


# --- limits --------------------------------------------------------------------------------------------------


def test_a_full_prefill_queue_refuses_by_name_and_the_twin_is_let_go(running: FaultyCluster) -> None:
    """A2, B3: the prefill worker refuses after the decode worker has reserved blocks."""
    prefill = running.cluster.prefill[0]
    held = [prefilling(running, 200), Stream(running.address, prompt(201), greedy(5))]
    running.until_counts(prefill, lambda c: c.num_waiting == 1, "the queue")
    refused = Stream(running.address, prompt(202), greedy(5))
    refused.end(2)
    assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "prefill worker's queue is full" in refused.details and "--max-waiting" in refused.details
    assert running.cluster.counts(running.cluster.decode[0]).num_running == 2
    running.faults.lift("stall")
    for stream in held:
        stream.end(20)
        assert stream.code is grpc.StatusCode.OK, stream.details
    running.cluster.wait_baseline()


def test_a_full_decode_queue_refuses_by_name(running: FaultyCluster) -> None:
    """The decode worker's blocks are reserved for two long prompts, two more requests wait, the next is refused."""
    decode = running.cluster.decode[0]
    running.faults.put("stall")
    streams = [Stream(running.address, prompt(300 + number, 90), greedy(5)) for number in range(2)]
    running.until_counts(decode, lambda c: c.num_running == 2, "two reservations")
    streams += [Stream(running.address, prompt(310 + number, 60), greedy(5)) for number in range(2)]
    running.until_counts(decode, lambda c: c.num_waiting == 2, "the queue")
    refused = Stream(running.address, prompt(320), greedy(5))
    refused.end(2)
    assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "decode worker's queue is full" in refused.details and "max_waiting is 2" in refused.details
    running.faults.lift("stall")
    for stream in streams:
        stream.end(20)
        assert stream.code is grpc.StatusCode.OK, stream.details
    running.cluster.wait_baseline()


def test_a_prompt_that_only_the_decode_worker_can_read(running: FaultyCluster) -> None:
    """B1: longer than P's max_model_len. The router knows and asks D alone; P itself refuses, whoever asks."""
    long = prompt(500, 130)
    reply = generate(running.address, long, greedy(6))
    assert reply.finished is not None and reply.finished.prefill_worker == ""
    assert (reply.usage.decode_computed_tokens, len(reply.token_ids)) == (130, 6)
    with grpc.insecure_channel(running.cluster.prefill[0].address) as channel:
        request = worker_pb2.PrefillRequest(request_id="direct", token_ids=long, timeout_s=5)
        with pytest.raises(grpc.RpcError) as caught:
            worker_pb2_grpc.WorkerStub(channel).Prefill(request, timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert "120" in caught.value.details()  # type: ignore[attr-defined]
    running.cluster.wait_baseline()


def test_the_routers_counts_are_on_the_wire(running: FaultyCluster) -> None:
    stream = prefilling(running, 400)
    counts = running.cluster.router_counts()
    assert (counts.num_in_flight, counts.num_leases, counts.max_in_flight) == (1, 2, 512)
    stream.cancel()
    stream.end(5)
    running.faults.lift("stall")
    running.cluster.wait_baseline()
