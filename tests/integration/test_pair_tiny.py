"""One prefill and one decode worker as real processes on the tiny model: everything that needs no large model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from phasor.v1 import inference_pb2 as pb
from tests.helpers.calls import generate, generate_together, greedy
from tests.helpers.cluster import Cluster, cluster
from tests.helpers.models import TINY_FOLDER
from tests.helpers.reference import GreedyReference, assert_tokens_equal

pytestmark = pytest.mark.timeout(300)

SMALL = ("--kv-memory", "2MiB", "--max-step-tokens", "32", "--block-tokens", "4")


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with cluster(TINY_FOLDER, worker_args=SMALL) as running:
        yield running


def reference(text: str, num_new: int = 24) -> GreedyReference:
    return GreedyReference.of_prompts(TINY_FOLDER, {"p": list(text.encode())}, num_new=num_new)["p"]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33, 65, 128])
def test_lengths_around_block_and_chunk_edges(pair: Cluster, length: int) -> None:
    text = ("def __init__(self, value):\n    self.value = value\n" * 4)[:length]
    reply = generate(pair.address, text, greedy(24))
    assert_tokens_equal(f"length {length}", reference(text), reply.token_ids)
    assert reply.usage.decode_computed_tokens == 0
    pair.wait_baseline(*pair.prefill, *pair.decode)


def test_max_tokens_1_is_one_token_and_leaves_nothing(pair: Cluster) -> None:
    reply = generate(pair.address, "import ", greedy(1))
    assert len(reply.token_ids) == 1 and reply.usage.completion_tokens == 1
    pair.wait_baseline(*pair.prefill, *pair.decode)


def test_a_hundred_sub_block_prompts_leave_nothing(pair: Cluster) -> None:
    for number in range(100):
        generate(pair.address, [number % 100 + 20] * (1 + number % 5), greedy(2))
    pair.wait_baseline(*pair.prefill, *pair.decode)


def test_eight_at_once_equal_each_alone(pair: Cluster) -> None:
    texts = [f"class Thing{i}:\n    def method_{i}(self):\n        return " for i in range(8)]
    replies = generate_together(pair.address, [list(t.encode()) for t in texts], greedy(24))
    for text, reply in zip(texts, replies, strict=True):
        assert_tokens_equal(text, reference(text), reply.token_ids)
    pair.wait_baseline(*pair.prefill, *pair.decode)


def test_stop_string_ends_the_reply_before_it(pair: Cluster) -> None:
    whole = generate(pair.address, "import os\nimport ", greedy(40)).text
    stop = whole[10:13]
    reply = generate(pair.address, "import os\nimport ", greedy(40, stop=[stop]))
    assert reply.text == whole[: whole.index(stop)]
    assert reply.finished is not None and reply.finished.stop_string == stop
    pair.wait_baseline(*pair.prefill, *pair.decode)


def test_a_seed_gives_the_same_reply_alone_and_in_company(pair: Cluster) -> None:
    sampling = pb.SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=1234, max_tokens=30)
    alone = generate(pair.address, "for i in ", sampling)
    prompts = [list(b"for i in "), list(b"while True:"), list(b"try:\n"), list(b"return ")]
    together = generate_together(pair.address, prompts, sampling)
    assert together[0].token_ids == alone.token_ids
    other = pb.SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=1235, max_tokens=30)
    assert generate(pair.address, "for i in ", other).token_ids != alone.token_ids


def test_pressure_preempts_and_changes_no_answer() -> None:
    """A pool for little more than one sequence: twelve together, greedy and seeded, are read again now and then."""
    args = (
        "--kv-memory",
        "600KiB",
        "--block-tokens",
        "4",
        "--max-step-tokens",
        "32",
        "--max-model-len",
        "160",
    )
    texts = [f"def function_{i}(argument):\n" for i in range(8)]
    with cluster(TINY_FOLDER, worker_args=args) as running:
        seeded = [pb.SamplingParams(temperature=0.9, top_p=0.95, seed=n, max_tokens=100) for n in range(4)]
        alone = [generate(running.address, texts[n], seeded[n]).token_ids for n in range(4)]
        assert running.counts(running.decode[0]).num_preemptions_total == 0
        with ThreadPoolExecutor(4) as pool:
            together = pool.map(lambda n: generate(running.address, texts[n], seeded[n]), range(4))
            replies = generate_together(running.address, [list(t.encode()) for t in texts], greedy(100))
        for text, reply in zip(texts, replies, strict=True):
            assert_tokens_equal(text, reference(text, 100), reply.token_ids)
        assert [reply.token_ids for reply in together] == alone
        assert running.counts(running.decode[0]).num_preemptions_total > 0
        running.wait_baseline(*running.prefill, *running.decode)


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "mentions"),
    [
        ([], greedy(4), grpc.StatusCode.INVALID_ARGUMENT, "empty"),
        ("", greedy(4), grpc.StatusCode.INVALID_ARGUMENT, "empty"),
        ([1, 256], greedy(4), grpc.StatusCode.INVALID_ARGUMENT, "256"),
        ([1] * 257, greedy(4), grpc.StatusCode.INVALID_ARGUMENT, "256"),
        ([1] * 250, greedy(40), grpc.StatusCode.INVALID_ARGUMENT, "256"),
        ([1], greedy(0), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
    ],
)
def test_bad_input_names_field_value_and_way_out_and_kills_nobody(
    pair: Cluster, prompt: str | list[int], sampling: object, code: grpc.StatusCode, mentions: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(pair.address, prompt, sampling)  # type: ignore[arg-type]
    assert caught.value.code() is code  # type: ignore[attr-defined]
    assert mentions in caught.value.details()  # type: ignore[attr-defined]
    assert len(generate(pair.address, "x = ", greedy(3)).token_ids) == 3
    pair.wait_baseline(*pair.prefill, *pair.decode)
