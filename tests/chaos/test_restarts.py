"""A decode worker that is killed and started again at the same address, under load."""

import socket
import threading
from collections import Counter

import grpc
import pytest

from tests.helpers.calls import generate, greedy
from tests.helpers.cluster import cluster, start, until
from tests.helpers.models import TINY_FOLDER
from tests.helpers.streams import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ARGS = ("--kv-memory", "2MiB", "--block-tokens", "4", "--max-step-tokens", "16", "--transport-timeout", "2")
PROMPT = "class Node:\n    def __init__(self, "
NUM_RESTARTS = 5


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_restarts_at_one_address_under_load() -> None:
    """B10, D2: a new incarnation, new links, right answers; whatever failed says so; no OK without its tokens."""
    port = free_port()
    with cluster(TINY_FOLDER, worker_args=ARGS, decode_args=("--port", str(port))) as running:
        expected = generate(running.address, PROMPT, greedy(20)).token_ids
        stop = threading.Event()
        outcomes: Counter[grpc.StatusCode] = Counter()
        wrong: list[str] = []

        def load(number: int) -> None:
            while not stop.is_set():
                stream = Stream(running.address, PROMPT, greedy(20), timeout_s=10)
                stream.end(20)
                outcomes[stream.code] += 1
                if stream.code is grpc.StatusCode.OK:
                    if stream.token_ids != expected:
                        wrong.append(f"{stream.token_ids}")
                else:
                    if stream.code is not grpc.StatusCode.UNAVAILABLE:
                        wrong.append(f"{stream.code}: {stream.details}")
                    stop.wait(0.3)

        threads = [threading.Thread(target=load, args=(number,), daemon=True) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(NUM_RESTARTS):
                served = outcomes[grpc.StatusCode.OK]
                until(lambda: outcomes[grpc.StatusCode.OK] > served + 3, "answers")  # noqa: B023
                running.decode[0].kill()
                running.decode[0].stop()
                running.decode[0] = start(
                    "phasor.decode_worker", "--model", str(TINY_FOLDER), *ARGS, "--port", str(port)
                )
            served = outcomes[grpc.StatusCode.OK]
            until(lambda: outcomes[grpc.StatusCode.OK] > served + 3, "answers after the last restart")
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert not wrong, wrong
        assert outcomes[grpc.StatusCode.UNAVAILABLE] > 0, "nothing was in flight when it was killed"
        running.wait_baseline()
        reply = generate(running.address, PROMPT + "value", greedy(5))
        assert reply.usage.decode_computed_tokens == 0, "the prefill worker is used again"
