"""The way of one request through the router: real gRPC on loopback, fake workers in this process."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from phasor.core.errors import (
    CapacityError,
    InvalidRequestError,
    ModelNotFoundError,
    PhasorError,
    WorkerLostError,
)
from phasor.v1 import inference_pb2 as pb
from tests.helpers.fake_workers import TINY_FOLDER
from tests.helpers.router_cluster import PATIENCE_S, Cluster, read, running


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as started:
        await started.until_ready()
        yield started


# --- the way of one request -----------------------------------------------------------------------------------


async def test_decode_first_then_prefill_with_its_ticket(cluster: Cluster) -> None:
    (p,), (d,) = cluster.prefill, cluster.decode
    text, ids, finished = await read(cluster.generate(request_id="mine"))
    assert (text, ids) == ("ABC", [65, 66, 67])
    (decode_request,), (prefill_request,) = d.requests, p.requests
    assert decode_request.request_id == prefill_request.request_id == "mine"
    assert list(decode_request.token_ids) == list(b"hello") == list(prefill_request.token_ids)
    assert decode_request.sampling == prefill_request.sampling
    assert decode_request.sampling.HasField("seed"), "the router draws one, the same for both"
    assert not decode_request.local_prefill
    assert prefill_request.ticket.decode_address == d.address
    assert prefill_request.ticket.decode_incarnation == d.incarnation
    assert 0 < prefill_request.timeout_s <= decode_request.timeout_s <= 300
    assert (finished.prefill_worker, finished.decode_worker) == (p.incarnation, d.incarnation)
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH and finished.rope_tier == 1.0
    assert finished.usage == pb.Usage(
        prompt_tokens=5,
        completion_tokens=3,
        prefill_computed_tokens=5,
        transferred_tokens=5,
        transferred_bytes=5000,
    )
    timing = finished.timing
    assert timing.queue_s >= 0.25 and (timing.prefill_s, timing.transfer_s) == (0.5, 0.125)
    assert 0 < timing.first_token_s <= timing.total_s
    await cluster.until_idle()
    assert p.num_cancelled == d.num_cancelled == 0, "a normal end cancels nothing"


async def test_prefill_is_not_sent_before_the_decode_worker_admitted(cluster: Cluster) -> None:
    (p,), (d,) = cluster.prefill, cluster.decode
    d.admission.shut()
    call = cluster.generate()
    await d.admission.reached.wait()
    assert p.requests == []
    assert cluster.router.registry.num_in_flight() == 2, "both workers count the request from the choice on"
    d.admission.open()
    await read(call)


async def test_tokens_stream_before_the_reply_is_complete(cluster: Cluster) -> None:
    cluster.decode[0].tokens.shut()
    call = cluster.generate()
    first = await call.read()
    assert first.delta.text == "A"
    cluster.decode[0].tokens.open()
    await read(call)


async def test_max_tokens_1_waits_a_moment_for_the_prefill_workers_numbers(cluster: Cluster) -> None:
    cluster.prefill[0].end.shut()
    call = cluster.generate(max_tokens=1)
    assert (await call.read()).delta.text == "A"
    await cluster.until(lambda: cluster.decode[0].num_active == 0)
    cluster.prefill[0].end.open()
    _, _, finished = await read(call)
    assert finished.usage.prefill_computed_tokens == 5


async def test_without_prefill_worker_the_decode_worker_reads_the_prompt() -> None:
    async with running(num_prefill=0) as cluster:
        await cluster.until_ready()
        text, _, finished = await read(cluster.generate())
        assert text == "ABC" and finished.prefill_worker == ""
        assert finished.usage.decode_computed_tokens == 5 and finished.timing.prefill_s == 0.5
        assert cluster.decode[0].requests[0].local_prefill


async def test_short_prompts_and_requests_that_say_so_are_read_locally() -> None:
    async with running(local_prefill_tokens=4) as cluster:
        await cluster.until_ready()
        for prompt, metadata in [("1234", None), ("12345", None), ("12345", [("phasor-local-prefill", "1")])]:
            request = pb.GenerateRequest(prompt=prompt, sampling=pb.SamplingParams(max_tokens=1))
            await read(cluster.stub.Generate(request, timeout=10, metadata=metadata))
        assert [r.local_prefill for r in cluster.decode[0].requests] == [True, False, True]
        assert len(cluster.prefill[0].requests) == 1


async def test_token_ids_go_to_the_workers_as_they_are(cluster: Cluster) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[0, 255, 7]), sampling=pb.SamplingParams(max_tokens=1)
    )
    await read(cluster.stub.Generate(request, timeout=10))
    assert list(cluster.decode[0].requests[0].token_ids) == [0, 255, 7]


async def test_requests_spread_over_the_least_loaded_workers() -> None:
    async with running(num_prefill=2, num_decode=2) as cluster:
        await cluster.until_ready()
        for worker in cluster.decode:
            worker.tokens.shut()
        calls = [cluster.generate() for _ in range(4)]
        for call in calls:
            await call.read()
        await cluster.until(lambda: sum(len(w.requests) for w in cluster.decode) == 4)
        assert [len(worker.requests) for worker in cluster.decode] == [2, 2]
        # Health goes on meanwhile and must leave the counts alone (case G1).
        loads = {s.ref.address: s.in_flight for s in cluster.router.registry.snapshots()}
        assert [loads[worker.address] for worker in cluster.decode] == [2, 2]
        for worker in cluster.decode:
            worker.tokens.open()
        for call in calls:
            await read(call)
        await cluster.until_idle()


async def test_a_hundred_requests_at_once_leave_nothing_behind(cluster: Cluster) -> None:
    async def one(number: int) -> None:
        call = cluster.generate(prompt="x" * (1 + number % 50), max_tokens=1 + number % 5)
        if number % 3 == 0:
            await call.read()
            call.cancel()
        else:
            _, ids, finished = await read(call)
            assert len(ids) == finished.usage.completion_tokens == 1 + number % 5

    await asyncio.gather(*(one(number) for number in range(100)))
    await cluster.until_idle()


# --- chat, tokens, information --------------------------------------------------------------------------------


async def test_chat_uses_the_models_template(tmp_path: Path) -> None:
    shutil.copytree(TINY_FOLDER, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}>{% endif %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    async with running(num_prefill=0) as cluster:
        cluster.decode[0].model_folder = str(tmp_path / "model")
        await cluster.until_ready()
        messages = [pb.ChatMessage(role="user", content="Hi"), pb.ChatMessage(role="assistant", content="Yo")]
        request = pb.ChatRequest(messages=messages, sampling=pb.SamplingParams(max_tokens=2))
        text, _, _ = await read(cluster.stub.Chat(request, timeout=10))
        assert text == "AB"
        assert bytes(cluster.decode[0].requests[0].token_ids) == b"[user]Hi[assistant]Yo>"
        tokenized = await cluster.stub.Tokenize(
            pb.TokenizeRequest(messages=pb.MessageList(messages=messages))
        )
        assert bytes(tokenized.token_ids) == b"[user]Hi[assistant]Yo>"


async def test_chat_without_template_says_what_to_do(cluster: Cluster) -> None:
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hi")])
    error = await cluster.refused(cluster.stub.Chat(request, timeout=10))
    assert isinstance(error, InvalidRequestError) and "use Generate" in str(error)


async def test_tokenize_and_detokenize_round_trip(cluster: Cluster) -> None:
    text = "naïve 日本 👩‍👩‍👧\r\n"
    ids = (await cluster.stub.Tokenize(pb.TokenizeRequest(text=text), timeout=10)).token_ids
    assert list(ids) == list(text.encode())
    assert (await cluster.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids), timeout=10)).text == text
    error = await cluster.refused(
        cluster.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 256]), timeout=10)
    )
    assert isinstance(error, InvalidRequestError) and error.field == "token_ids[1]"


async def test_models_and_server_info(cluster: Cluster) -> None:
    (card,) = (await cluster.stub.ListModels(pb.ListModelsRequest(), timeout=10)).models
    assert (card.name, card.max_model_len, card.dtype, card.weights_digest) == (
        "tiny",
        256,
        "float32",
        "w" * 64,
    )
    info = await cluster.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    assert (
        info.version
        and info.model == card
        and info.identity.block_tokens == 16
        and info.rope.scheme == "default"
    )
    assert {(w.role, w.address, w.incarnation, w.healthy) for w in info.workers} == {
        (pb.WORKER_ROLE_PREFILL, cluster.prefill[0].address, cluster.prefill[0].incarnation, True),
        (pb.WORKER_ROLE_DECODE, cluster.decode[0].address, cluster.decode[0].incarnation, True),
    }


async def test_reflection_lists_the_services(cluster: Cluster) -> None:
    make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
    stub = make_stub(cluster.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
    )
    async for answer in call:
        names = {service.name for service in answer.list_services_response.service}
        assert {"phasor.v1.Inference", "grpc.health.v1.Health"} <= names


async def test_health_follows_the_decode_workers() -> None:
    async with running() as cluster:
        (p,), (d,) = cluster.prefill, cluster.decode
        d.ready = False
        await cluster.until(
            lambda: any(s.ref.incarnation == p.incarnation for s in cluster.router.registry.snapshots())
        )
        assert await cluster.health() == await cluster.health("phasor.v1.Inference") == "NOT_SERVING"
        error = await cluster.refused(cluster.generate())
        assert isinstance(error, WorkerLostError) and "no decode worker is ready" in str(error)
        d.ready = True
        await cluster.until_ready()
        await d.stop()
        await cluster.until_health("NOT_SERVING")


async def test_without_workers_there_is_no_model_and_a_clear_error() -> None:
    async with running(num_prefill=0, num_decode=0) as cluster:
        assert not (await cluster.stub.ListModels(pb.ListModelsRequest(), timeout=10)).models
        assert not (await cluster.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)).HasField("model")
        error = await cluster.refused(cluster.generate())
        assert isinstance(error, WorkerLostError) and "the router has no workers" in str(error)


async def test_a_model_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    async with running(num_prefill=0) as cluster:
        cluster.decode[0].model_folder = str(tmp_path)
        await cluster.until(lambda: not cluster.router.registry.snapshots()[0].why_not)
        async with asyncio.timeout(PATIENCE_S):
            while "no such file" not in str(error := await cluster.refused(cluster.generate())):
                pass
        assert str(tmp_path / "tokenizer.json") in str(error)
        assert await cluster.health() == "NOT_SERVING"


# --- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "kind", "text"),
    [
        (pb.GenerateRequest(), InvalidRequestError, "prompt=''"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), InvalidRequestError, "token_ids=''"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[256])), InvalidRequestError, "token_ids[0]=256"),
        (pb.GenerateRequest(prompt="x" * 256), InvalidRequestError, "max_model_len is 256"),
        (pb.GenerateRequest(prompt="x" * 99999), InvalidRequestError, "99999 characters"),
        (pb.GenerateRequest(prompt="x", model="gpt"), ModelNotFoundError, "served: 'tiny'"),
        (pb.GenerateRequest(prompt="x", request_id="a b"), InvalidRequestError, "request_id='a b'"),
        (pb.GenerateRequest(prompt="x", timeout_s=-1), InvalidRequestError, "timeout_s=-1.0"),
        (
            pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(temperature=float("nan"))),
            InvalidRequestError,
            "sampling.temperature=nan",
        ),
        (
            pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(max_tokens=256)),
            InvalidRequestError,
            "at most 255 fit",
        ),
    ],
)
async def test_bad_requests_are_refused_before_any_worker(
    cluster: Cluster, request_: pb.GenerateRequest, kind: type[PhasorError], text: str
) -> None:
    error = await cluster.refused(cluster.stub.Generate(request_, timeout=10))
    assert type(error) is kind and text in str(error)
    assert all(worker.requests == [] for worker in cluster.workers)
    assert cluster.router.num_in_flight == 0


async def test_a_request_that_no_pool_can_ever_hold() -> None:
    async with running(num_prefill=0) as cluster:
        cluster.decode[0].num_blocks = 4
        await cluster.until_ready()
        error = await cluster.refused(cluster.generate(prompt="x" * 64, max_tokens=1))
        assert isinstance(error, CapacityError) and error.ever and "64 tokens" in str(error)
        error = await cluster.refused(cluster.generate(prompt="x" * 60, max_tokens=5))
        assert isinstance(error, CapacityError) and error.ever and "at most 4" in str(error)
        await read(cluster.generate(prompt="x" * 60, max_tokens=4))


async def test_more_than_max_in_flight_are_refused_and_a_request_id_is_used_once() -> None:
    async with running(max_in_flight=2) as cluster:
        await cluster.until_ready()
        cluster.decode[0].tokens.shut()
        calls = [cluster.generate(request_id=f"r{number}") for number in range(2)]
        for call in calls:
            await call.read()
        error = await cluster.refused(cluster.generate(request_id="r0"))
        assert isinstance(error, InvalidRequestError) and "already in use" in str(error)
        error = await cluster.refused(cluster.generate())
        assert isinstance(error, CapacityError) and "max_in_flight is 2" in str(error) and not error.ever
        cluster.decode[0].tokens.open()
        for call in calls:
            await read(call)
        await read(cluster.generate(request_id="r0"))
