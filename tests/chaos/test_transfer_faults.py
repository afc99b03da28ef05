"""Faults of the link between two real workers: the request fails in seconds, honestly, and nothing stays behind."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.helpers.calls import generate, greedy
from tests.helpers.cluster import until
from tests.helpers.faults import FaultyCluster, faulty_cluster
from tests.helpers.streams import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ARGS = (
    *("--kv-memory", "400KiB", "--block-tokens", "4", "--max-model-len", "160"),
    *("--max-step-tokens", "32", "--transport-timeout", "2"),
)
PROMPT = "class Reader:\n    def read(self, path):\n"
NUM_BLOCKS = -(-len(PROMPT) // 4)
FAILS_WITHIN_S = 5.0
LOST = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    folder: Path = tmp_path_factory.mktemp("faults")
    # One block per step of the prefill worker: every block is a chunk of its own.
    with faulty_cluster(folder, worker_args=ARGS, prefill_args=("--max-step-tokens", "4")) as started:
        yield started


@pytest.fixture(autouse=True)
def _no_faults_left(running: FaultyCluster) -> Iterator[None]:
    yield
    running.faults.lift_all()
    running.cluster.wait_baseline(timeout_s=6.0)


def expected(running: FaultyCluster, prompt: str, num_tokens: int = 12) -> list[int]:
    """What the decode worker answers alone."""
    stream = Stream(running.address, prompt, greedy(num_tokens), local=True)
    stream.end(20)
    return stream.token_ids


def prompt_of(number: int | str) -> str:
    """A prompt of NUM_BLOCKS blocks whose first block nobody has seen."""
    return f"{number}~".rjust(4, "%") + PROMPT[4:]


def in_prefill_or_over(running: FaultyCluster, stream: Stream) -> bool:
    return stream.over or running.cluster.counts(running.cluster.prefill[0]).num_open_tickets > 0


@pytest.mark.parametrize("after", [0, 1, 2, NUM_BLOCKS // 2, NUM_BLOCKS - 1])
def test_sockets_cut_after_any_block(running: FaultyCluster, after: int) -> None:
    """B2, B11, B14: an error and never an OK; nothing left; the next request needs no other traffic to work."""
    prompt = prompt_of(after)
    running.faults.put("cut", str(after))
    stream = Stream(running.address, prompt, greedy(12))
    assert stream.end(FAILS_WITHIN_S) < FAILS_WITHIN_S
    assert stream.code is LOST, (stream.code, stream.details)
    assert not stream.token_ids and not running.faults.is_on("cut")
    running.cluster.wait_baseline()
    reply = generate(running.address, prompt, greedy(12))
    assert reply.usage.decode_computed_tokens == 0
    assert reply.token_ids == expected(running, prompt)


def test_a_flipped_bit_is_a_failed_transfer_and_never_becomes_a_cached_block(running: FaultyCluster) -> None:
    """A12: the damaged blocks are not found by the next request with the same prompt."""
    prompt = prompt_of("flip")
    failed = [
        running.cluster.counts(worker).num_transfer_failures_total for worker in running.cluster.workers
    ]
    running.faults.put("flip")
    stream = Stream(running.address, prompt, greedy(12))
    stream.end(FAILS_WITHIN_S)
    assert stream.code is LOST and "checksum" in stream.details, (stream.code, stream.details)
    running.cluster.wait_baseline()
    for worker, before in zip(running.cluster.workers, failed, strict=True):
        assert running.cluster.counts(worker).num_transfer_failures_total == before + 1
    decode = running.cluster.decode[0]
    reused = running.cluster.counts(decode).prompt_tokens_reused_total
    reply = generate(running.address, prompt, greedy(12))
    assert running.cluster.counts(decode).prompt_tokens_reused_total == reused
    assert reply.usage.transferred_tokens == len(prompt)
    assert reply.token_ids == expected(running, prompt)


def test_pages_that_come_after_an_abort_reach_nobody(running: FaultyCluster) -> None:
    """A7: A is left while its sender is slow, B takes A's blocks, and then A's pages arrive."""
    prompts = [prompt_of(f"b{n}") for n in range(3)]
    alone = [expected(running, prompt, 100) for prompt in prompts]
    running.faults.put("stall")
    left = Stream(running.address, prompt_of("a"), greedy(60))
    decode = running.cluster.decode[0]
    running.until_counts(decode, lambda c: c.num_open_tickets == 1, "A's ticket")
    left.cancel()
    left.end(5)
    running.cluster.wait_baseline(decode)
    streams = [Stream(running.address, prompt, greedy(100), local=True) for prompt in prompts]
    assert all(stream.first.wait(20) for stream in streams)
    running.faults.lift("stall")
    for stream, tokens in zip(streams, alone, strict=True):
        stream.end(20)
        assert stream.token_ids == tokens
    running.cluster.wait_baseline()
    assert generate(running.address, prompt_of("a"), greedy(12)).token_ids == expected(
        running, prompt_of("a")
    )


def test_a_sender_that_stays_slow_ends_at_the_links_timeout(running: FaultyCluster) -> None:
    """A1, B3: the other leg is told at once; blocks and ticket are not held for a slow peer."""
    running.faults.put("stall")
    stream = Stream(running.address, prompt_of("slow"), greedy(12))
    assert stream.end(FAILS_WITHIN_S) < FAILS_WITHIN_S
    assert stream.code in (LOST, grpc.StatusCode.DEADLINE_EXCEEDED), (stream.code, stream.details)
    running.cluster.wait_baseline()


def test_a_rendezvous_that_nobody_answers(running: FaultyCluster) -> None:
    """B4: the configured timeout bounds the opening of a link too."""
    running.faults.put("cut", "0")
    Stream(running.address, prompt_of("no link"), greedy(2)).end(FAILS_WITHIN_S)
    running.faults.put("deaf")
    stream = Stream(running.address, prompt_of("deaf"), greedy(12))
    assert stream.end(2 * FAILS_WITHIN_S) < FAILS_WITHIN_S
    assert stream.code in (LOST, grpc.StatusCode.DEADLINE_EXCEEDED), (stream.code, stream.details)
    running.cluster.wait_baseline()
    running.faults.lift("deaf")
    assert generate(running.address, prompt_of("deaf"), greedy(12)).token_ids == expected(
        running, prompt_of("deaf")
    )


def test_links_that_break_all_the_time(running: FaultyCluster) -> None:
    """B2, B11, D2: eight clients, and the sockets are cut every few blocks: right answers or UNAVAILABLE, no hang."""
    random_ = random.Random(11)
    prompts = [prompt_of(f"{n}x") + "#" * (7 * n) for n in range(8)]
    alone = [expected(running, prompt, 16) for prompt in prompts]
    stop = threading.Event()
    codes: Counter[grpc.StatusCode] = Counter()

    def cut() -> None:
        while not stop.wait(random_.uniform(0.02, 0.2)):
            if not running.faults.is_on("cut"):
                running.faults.put("cut", str(random_.randrange(12)))

    def client(number: int) -> None:
        for _ in range(12):
            stream = Stream(running.address, prompts[number], greedy(16))
            stream.end(20)
            codes[stream.code] += 1
            assert stream.code in (grpc.StatusCode.OK, LOST), stream.details
            if stream.code is grpc.StatusCode.OK:
                assert stream.token_ids == alone[number]

    cutting = threading.Thread(target=cut, daemon=True)
    cutting.start()
    try:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(client, range(len(prompts))))
    finally:
        stop.set()
        cutting.join(5)
    assert codes[LOST] > 3, codes
    running.faults.lift_all()
    running.cluster.wait_baseline()


def test_the_first_request_after_an_idle_time_works(running: FaultyCluster) -> None:
    """B17: idle for longer than every timeout of a link."""
    first = generate(running.address, prompt_of("idle"), greedy(12)).token_ids
    time.sleep(4.5)
    reply = generate(running.address, prompt_of("idle"), greedy(12))
    assert reply.token_ids == first and reply.usage.decode_computed_tokens == 0


def test_a_request_left_in_prefill_does_not_hold_up_the_next(running: FaultyCluster) -> None:
    """B7: cancel while pages are on their way, then send; again and again."""
    alone = expected(running, PROMPT, 6)
    for number in range(100):
        stream = Stream(running.address, prompt_of(f"{number}c"), greedy(30))
        if number % 3 == 0:
            until(partial(in_prefill_or_over, running, stream), "its prefill")
        stream.cancel()
        assert generate(running.address, PROMPT, greedy(6), timeout_s=10).token_ids == alone
        stream.end(5)
    running.cluster.wait_baseline()
