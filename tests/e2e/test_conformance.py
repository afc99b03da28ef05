"""Nobody can tell from an answer that two workers made it: every parameter, directly on one worker and through P/D.

The answers are compared as JSON, all but ids, timing, worker names and where tokens were computed. The tiny model,
real processes. `facts`: rows A13, H2, H4, H5, H6 and H9 of the public bug reports in docs/cases.md are here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.json_format import MessageToDict
from tokenizers import Tokenizer

from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc
from tests.helpers.cluster import Cluster, cluster
from tests.helpers.models import TINY_FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ARGS = ("--kv-memory", "16MiB", "--block-tokens", "8", "--max-step-tokens", "32")
PROMPT = "def add(first, second):\n    return first + second\n\n\ndef main():\n    "
EDGE = PROMPT[:40]
PLACE = (
    "cachedTokens",
    "prefillComputedTokens",
    "decodeComputedTokens",
    "transferredTokens",
    "transferredBytes",
)


@pytest.fixture(scope="module")
def combined() -> Iterator[Cluster]:
    with cluster(TINY_FOLDER, num_prefill=0, worker_args=ARGS) as running:
        yield running


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with cluster(TINY_FOLDER, worker_args=ARGS) as running:
        yield running


def ask(running: Cluster, request: Any, *, timeout_s: float = 30.0) -> list[pb.GenerateResponse]:
    with grpc.insecure_channel(running.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        method = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Generate
        return list(method(request, timeout=timeout_s))


def generate(prompt: str = PROMPT, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=prompt, sampling=pb.SamplingParams(**{"max_tokens": 24, **sampling}))


def visible(responses: list[pb.GenerateResponse]) -> str:
    """What must be equal, as JSON. Log-probabilities are rounded: another batch may sum in another order."""
    shown = []
    for response in responses:
        message = MessageToDict(response, always_print_fields_with_no_presence=True)
        message.pop("requestId")
        finished = message.get("finished")
        if finished is not None:
            for name in ("timing", "prefillWorker", "decodeWorker"):
                finished.pop(name, None)
            for name in PLACE:
                finished["usage"].pop(name)
        shown.append(message)
    return json.dumps(rounded(shown), indent=1, sort_keys=True)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


SAMPLED = {"temperature": 0.9, "seed": 11}
REQUESTS = {
    "greedy": generate(temperature=0),
    "temperature": generate(**SAMPLED),
    "top_k": generate(**SAMPLED, top_k=5),
    "top_p": generate(**SAMPLED, top_p=0.7),
    "min_p": generate(**SAMPLED, min_p=0.2),
    "all cuts": generate(temperature=1.7, seed=2**64 - 1, top_k=40, top_p=0.95, min_p=0.02),
    "presence_penalty": generate(temperature=0, presence_penalty=1.5),
    "frequency_penalty": generate(**SAMPLED, frequency_penalty=-1.5),
    "repetition_penalty": generate(temperature=0, repetition_penalty=1.3),
    "all penalties": generate(**SAMPLED, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.1),
    "logit_bias": generate(temperature=0, logit_bias={120: 100.0}),
    "forbidden first token": generate(temperature=0, logit_bias={114: -100.0, 112: -100.0}),
    "min_tokens": generate(temperature=0, stop_token_ids=list(range(64, 128)), min_tokens=9),
    "max_tokens 1": generate(temperature=0, max_tokens=1),
    "stop_token_ids at once": generate(temperature=0, stop_token_ids=list(range(64, 128))),
    "stop string": generate(temperature=0, stop=["rn", "("]),
    "stop string behind min_tokens": generate(temperature=0, stop=["e", "r", " "], min_tokens=12),
    "ignore_eos": generate(temperature=0, ignore_eos=True, max_tokens=60),
    "logprobs": generate(temperature=0, logprobs=0, max_tokens=3),
    "top_logprobs": generate(**SAMPLED, logprobs=20, max_tokens=3),
    "prompt_logprobs": generate(temperature=0, prompt_logprobs=5),
    "prompt_logprobs of one token": generate("d", temperature=0, prompt_logprobs=2, max_tokens=2),
    "echo": generate(temperature=0, echo=True),
    "echo and logprobs": generate(temperature=0, echo=True, logprobs=2),
    "n": generate(**SAMPLED, n=4, logprobs=1),
    "n at a block's edge": generate(EDGE, **SAMPLED, n=3),
    "n of one token": generate("d", **SAMPLED, n=3),
    "n with different ends": generate(**SAMPLED, n=5, stop=["e", "\n"]),
    "n of max_tokens 1": generate(**SAMPLED, n=4, max_tokens=1),
    "best_of": generate(temperature=1.3, seed=5, n=2, best_of=6),
    "best_of with logprobs and echo": generate(temperature=1.3, seed=5, best_of=4, logprobs=1, echo=True),
    "bytes of several characters": generate("# 数据 👩‍👩‍👧 é", temperature=1.5, seed=3, max_tokens=60),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_one_worker_and_two_give_the_same_json(name: str, combined: Cluster, pair: Cluster) -> None:
    """Rows H5, H6, H9 and more: cold on both, then again with what the pools kept."""
    alone = ask(combined, REQUESTS[name])
    assert visible(ask(pair, REQUESTS[name])) == visible(alone)
    assert visible(ask(pair, REQUESTS[name])) == visible(alone), "with a warm pool"
    usage = alone[-1].finished.usage
    assert usage.completion_tokens == sum(len(r.delta.token_ids) for r in alone) or "best_of" in name
    combined.wait_baseline(*combined.decode)
    pair.wait_baseline(*pair.prefill, *pair.decode)


def test_prefill_worker_reads_all_of_it_in_pairs(pair: Cluster) -> None:
    """Row H9: the prefill leg makes one token, whatever the limit, and the decode worker computes no prompt."""
    before = pair.counts(pair.prefill[0])
    responses = ask(pair, generate(PROMPT[:-3] + "pass", temperature=0, n=3))
    usage = responses[-1].finished.usage
    after = pair.counts(pair.prefill[0])
    assert usage.decode_computed_tokens == 0 and usage.transferred_tokens > 0
    assert (
        after.prompt_tokens_computed_total - before.prompt_tokens_computed_total
        == usage.prefill_computed_tokens
    )
    assert usage.prefill_computed_tokens + usage.cached_tokens == usage.prompt_tokens, (
        "the prompt was read once"
    )


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32, local_files_only=True)


@pytest.mark.parametrize("chunks", [1, 3])
def test_log_probabilities_are_transformers_own(chunks: int, pair: Cluster, reference: Any) -> None:
    """Of every token of the prompt and of the reply, over several chunks too."""
    prompt = PROMPT * chunks
    responses = ask(
        pair, generate(prompt, temperature=0.8, seed=4, logprobs=3, prompt_logprobs=3, max_tokens=9)
    )
    shown = responses[0].prompt
    deltas = [r.delta for r in responses if r.HasField("delta")]
    reply = [token for d in deltas for token in d.token_ids]
    scored = [*shown.logprobs, *(one for d in deltas for one in d.logprobs)]
    ids = [*shown.token_ids, *reply]
    assert len(scored) == len(ids) and not scored[0].HasField("logprob")
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    for position in range(1, len(ids)):
        row = want[position - 1]
        assert scored[position].logprob == pytest.approx(float(row[ids[position]]), abs=1e-4)
        assert [t.logprob for t in scored[position].top] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )


def test_penalties_are_transformers_own(pair: Cluster, reference: Any) -> None:
    tokenizer = Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    with torch.inference_mode():
        want = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            repetition_penalty=1.3,
            pad_token_id=0,
        )
    responses = ask(pair, generate(temperature=0, repetition_penalty=1.3))
    assert [t for r in responses for t in r.delta.token_ids] == want[0, len(ids) :].tolist()


def test_each_of_n_replies_is_what_its_own_seed_gives_alone(pair: Cluster) -> None:
    """Row A13: the first is the single reply of that seed, all differ, and the prompt is counted once."""
    single = ask(pair, generate(**SAMPLED))
    several = ask(pair, generate(**SAMPLED, n=4))
    replies = {
        index: [t for r in several if r.delta.index == index for t in r.delta.token_ids] for index in range(4)
    }
    assert replies[0] == [t for r in single for t in r.delta.token_ids]
    assert len({tuple(reply) for reply in replies.values()}) == 4
    finished = several[-1].finished
    assert finished.usage.prompt_tokens == single[-1].finished.usage.prompt_tokens
    assert [end.index for end in finished.choices] == [0, 1, 2, 3]
    assert sum(end.completion_tokens for end in finished.choices) == finished.usage.completion_tokens


def test_n_in_a_loop_and_clients_that_leave(pair: Cluster) -> None:
    """Rows A13 and H4: fifty times four replies, some of them given up, leave nothing."""
    with grpc.insecure_channel(pair.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for number in range(50):
            request = generate(PROMPT[number:], **SAMPLED, n=4, max_tokens=6)
            call = stub.Generate(request, timeout=30)
            responses = [next(call)] if number % 5 == 0 else list(call)
            if number % 5 == 0:
                call.cancel()
            else:
                assert len(responses[-1].finished.choices) == 4
    pair.wait_baseline(*pair.prefill, *pair.decode)


def test_pressure_preempts_single_replies_and_changes_none() -> None:
    """A pool that holds the prompt and little more: the replies take turns."""
    args = (
        "--kv-memory",
        "300KiB",
        "--block-tokens",
        "4",
        "--max-step-tokens",
        "32",
        "--max-model-len",
        "80",
    )
    request = generate(EDGE[:21], **SAMPLED, n=4, max_tokens=40, ignore_eos=True)
    with cluster(TINY_FOLDER, worker_args=args) as small:
        responses = ask(small, request)
        usage = responses[-1].finished.usage
        small.wait_baseline(*small.prefill, *small.decode)
    assert usage.num_preemptions > 0, "the pool is too large for this test to mean anything"
    for index in range(4):
        assert sum(len(r.delta.token_ids) for r in responses if r.delta.index == index) == 40
    with cluster(TINY_FOLDER, num_prefill=0, worker_args=ARGS) as large:
        want = ask(large, request)
    for index in range(4):
        assert tokens_of(responses, index) == tokens_of(want, index)


def tokens_of(responses: list[pb.GenerateResponse], index: int) -> list[int]:
    return [t for r in responses if r.delta.index == index for t in r.delta.token_ids]


def test_characters_stay_whole_and_join_to_the_text(pair: Cluster) -> None:
    """Row H2: bytes of several-byte characters, forced one by one, come out as characters."""
    tokenizer = Tokenizer.from_file(str(TINY_FOLDER / "tokenizer.json"))
    text = "👩‍👩‍👧数é"
    ids = tokenizer.encode(text).ids
    assert len(ids) > len(text)
    shown = ""
    for count in range(1, len(ids) + 1):
        request = pb.GenerateRequest(sampling=pb.SamplingParams(temperature=0, max_tokens=1))
        request.token_ids.ids.extend(tokenizer.encode("# ").ids + ids[: count - 1])
        request.sampling.logit_bias[ids[count - 1]] = 100.0
        (first, _) = ask(pair, request)
        assert list(first.delta.token_ids) == [ids[count - 1]]
        shown += first.delta.text
    assert "�" in shown, "alone, a part of a character is none"
    request = pb.GenerateRequest(
        prompt=text, sampling=pb.SamplingParams(echo=True, temperature=0, max_tokens=1)
    )
    assert ask(pair, request)[0].prompt.text == text


BAD = {
    "sampling.min_p": {"min_p": 1.5},
    "sampling.presence_penalty": {"presence_penalty": 2.5},
    "sampling.frequency_penalty": {"frequency_penalty": float("nan")},
    "sampling.repetition_penalty": {"repetition_penalty": 0.0},
    "sampling.logit_bias": {"logit_bias": {256: 1.0}},
    "sampling.logit_bias[3]": {"logit_bias": {3: 101.0}},
    "sampling.min_tokens": {"min_tokens": 25},
    "sampling.logprobs": {"logprobs": 21},
    "sampling.prompt_logprobs": {"prompt_logprobs": -1},
    "sampling.n": {"n": 0},
    "sampling.best_of": {"n": 3, "best_of": 2},
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_value_is_refused_by_field_and_disturbs_nobody(field: str, pair: Cluster) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(pair, generate(**BAD[field]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in caught.value.details()
    assert len(ask(pair, generate(temperature=0, max_tokens=2))) == 3


def test_echo_of_a_chat_is_refused_with_the_way_out(pair: Cluster, tmp_path: Path) -> None:
    request = pb.ChatRequest(sampling=pb.SamplingParams(echo=True, max_tokens=2))
    request.messages.add(role="user", content="x")
    with pytest.raises(grpc.RpcError) as caught:
        ask(pair, request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
