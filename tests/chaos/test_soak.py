"""500 requests over tiny pools, a fifth of them left at a random moment: nobody's answer changes, nothing is left.

The seed is printed; PHASOR_SOAK_SEED replays it (the same requests and the same moments; scheduling is the
machine's). PHASOR_SOAK_REQUESTS makes it longer.
"""

import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import psutil
import pytest

from phasor.v1 import inference_pb2 as pb
from tests.helpers.calls import greedy
from tests.helpers.cluster import Cluster, cluster
from tests.helpers.models import TINY_FOLDER
from tests.helpers.reference import GreedyReference, assert_tokens_equal
from tests.helpers.streams import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEED = int(os.environ.get("PHASOR_SOAK_SEED", "20261201"))
NUM_REQUESTS = int(os.environ.get("PHASOR_SOAK_REQUESTS", "500"))
NUM_CLIENTS = 10
NUM_KINDS = 50
ABORTED = 0.3
"""Share of requests whose client means to leave; some end before it does, and a fifth really leave."""
TEXT = "import os\n\n\nclass Store:\n    def get(self, key):\n        return self.values.get(key)\n" * 2
ARGS = (
    *("--kv-memory", "330KiB", "--block-tokens", "4", "--max-model-len", "140", "--max-step-tokens", "24"),
    *("--max-running", "8", "--transport-timeout", "3"),
)
PROBE = ("def probe():\n    return ", 12)


@dataclass(frozen=True)
class Kind:
    """One request that is sent many times: alone first, then in company."""

    prompt: tuple[int, ...]
    sampling: pb.SamplingParams
    local: bool


def draw_kinds(random_: random.Random) -> list[Kind]:
    kinds = []
    for number in range(NUM_KINDS):
        # Half of them begin with the same text, so that caches are hit and blocks are shared.
        start = 0 if number % 2 else random_.randrange(60)
        prompt = TEXT[start : start + random_.choice([1, 3, 4, 5, 15, 16, 17, 33, 64, 90])]
        max_tokens = random_.choice([1, 2, 7, 20, 45])
        if number % 3 == 0:
            sampling = greedy(max_tokens)
        else:
            sampling = pb.SamplingParams(
                temperature=random_.choice([0.7, 1.0, 1.3]),
                top_k=random_.choice([0, 5, 40]),
                top_p=random_.choice([0.8, 0.95, 1.0]),
                seed=random_.randrange(2**63),
                max_tokens=max_tokens,
                n=random_.choice([1, 1, 1, 3]),
            )
        kinds.append(Kind(tuple(prompt.encode()), sampling, local=random_.random() < 0.15))
    return kinds


def solo(address: str, kind: Kind) -> dict[int, list[int]]:
    stream = Stream(address, kind.prompt, kind.sampling, local=kind.local)
    stream.end(30)
    assert stream.code is grpc.StatusCode.OK, stream.details
    return stream.replies


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster(TINY_FOLDER, num_prefill=2, num_decode=2, worker_args=ARGS) as started:
        processes = [started.router, *started.workers]
        family = [psutil.Process(p.popen.pid) for p in processes]
        family += [child for parent in family for child in parent.children(recursive=True)]
        yield started
    assert not [process for process in family if process.is_running()], "a process outlived its cluster"


def check_answer(kind: Kind, expected: dict[int, list[int]], stream: Stream, name: str) -> None:
    assert stream.code is grpc.StatusCode.OK, (name, stream.code, stream.details)
    if stream.replies == expected:
        return
    assert kind.sampling.temperature == 0, f"{name}: {stream.replies} instead of {expected}"
    prompts = {"p": list(kind.prompt)}
    reference = GreedyReference.of_prompts(TINY_FOLDER, prompts, num_new=kind.sampling.max_tokens)["p"]
    assert_tokens_equal(name, reference, stream.token_ids)


def test_soak(running: Cluster) -> None:
    """A8, A13 and the issue's soak: mixed lengths, greedy and seeded, one reply and three, preemption, aborts, and a
    probe in between."""
    sys.stdout.write(f"soak seed: {SEED} (replay with PHASOR_SOAK_SEED={SEED})\n")
    random_ = random.Random(SEED)
    kinds = draw_kinds(random_)
    expected = [solo(running.address, kind) for kind in kinds]
    probe = Kind(tuple(PROBE[0].encode()), greedy(PROBE[1]), local=False)
    expected_probe = solo(running.address, probe)
    plan = [
        (random_.randrange(NUM_KINDS), random_.uniform(0, 0.25) if random_.random() < ABORTED else None)
        for _ in range(NUM_REQUESTS)
    ]

    def one(number: int) -> bool:
        """Send request `number`; returns whether it was left before its end."""
        index, leave_after_s = plan[number]
        kind = kinds[index]
        stream = Stream(running.address, kind.prompt, kind.sampling, local=kind.local)
        if leave_after_s is not None:
            time.sleep(leave_after_s)
            stream.cancel()
        stream.end(60)
        if leave_after_s is not None and stream.code is grpc.StatusCode.CANCELLED:
            for choice, tokens in stream.replies.items():
                assert tokens == expected[index][choice][: len(tokens)], f"seed {SEED}, request {number}"
            return True
        check_answer(kind, expected[index], stream, f"seed {SEED}, request {number}")
        if number % 50 == 0:
            beside = Stream(running.address, probe.prompt, probe.sampling)
            beside.end(60)
            check_answer(probe, expected_probe, beside, f"seed {SEED}, probe at {number}")
        return False

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        num_left = sum(pool.map(one, range(NUM_REQUESTS)))
    running.wait_baseline()
    counts = [running.counts(process) for process in running.decode]
    sys.stdout.write(
        f"left {num_left} of {NUM_REQUESTS}; preempted {[c.num_preemptions_total for c in counts]}, "
        f"reused {[running.counts(p).prompt_tokens_reused_total for p in running.workers]} tokens\n"
    )
    assert num_left > 0.1 * NUM_REQUESTS
    assert sum(c.num_preemptions_total for c in counts) > 0, (
        "no pressure: the pools are too large for this test"
    )
