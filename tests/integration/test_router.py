"""The router as clients and workers see it: real gRPC on loopback, fake workers in this process."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from phasor.core.config import RouterConfig
from phasor.core.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    PhasorError,
    TransferError,
    WorkerLostError,
)
from phasor.router.registry import Member, RegistryTimings
from phasor.router.server import RouterServer
from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc, worker_pb2
from phasor.wire import channels, status
from tests.helpers.fake_workers import TINY_FOLDER, FakeWire, FakeWorker, make_identity

TIMINGS = RegistryTimings(poll_s=0.05, retry_s=0.02, probe_timeout_s=0.3, max_missed=3)
PATIENCE_S = 20.0
"""A bound for waits that normally take milliseconds; nothing asserts how long they took."""


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something that has no event of its own is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Cluster:
    """A router, its workers and a client channel."""

    def __init__(self, num_prefill: int, num_decode: int, config: RouterConfig) -> None:
        wire = FakeWire()
        self.prefill = [FakeWorker("prefill", wire) for _ in range(num_prefill)]
        self.decode = [FakeWorker("decode", wire) for _ in range(num_decode)]
        self.router = RouterServer(config, timings=TIMINGS, validate=True)
        self.address = ""
        self.channel: grpc.aio.Channel
        self.stub: Any

    @property
    def workers(self) -> list[FakeWorker]:
        return self.prefill + self.decode

    def members(self) -> list[Member]:
        return [Member(worker.role, worker.address) for worker in self.workers]

    async def start(self) -> None:
        for worker in self.workers:
            await worker.start()
        self.address = await self.router.start()
        self.router.set_members(self.members())
        self.channel = channels.connect(self.address)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self.router.stop(0.0)
        for worker in self.workers:
            await worker.stop()

    async def until(self, condition: Callable[[], bool]) -> None:
        async def ask() -> bool:
            return condition()

        await eventually(ask)

    async def until_ready(self) -> None:
        await self.until(lambda: all(not s.why_not for s in self.router.registry.snapshots()))
        await self.until_health("SERVING")

    async def until_health(self, value: str) -> None:
        async def ask() -> bool:
            return await self.health() == value

        await eventually(ask)

    async def health(self, service: str = "") -> str:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def until_idle(self) -> None:
        """Every count is back at its baseline."""
        await self.until(lambda: self.router.num_in_flight == 0 and self.router.registry.num_in_flight() == 0)
        await self.until(lambda: all(worker.num_active == 0 for worker in self.workers))

    def generate(self, prompt: str = "hello", max_tokens: int = 3, **fields: Any) -> Any:
        sampling = pb.SamplingParams(max_tokens=max_tokens)
        return self.stub.Generate(pb.GenerateRequest(prompt=prompt, sampling=sampling, **fields), timeout=30)

    async def refused(self, call: Any) -> PhasorError:
        """The error that a call ends with, as a client of ours raises it."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if hasattr(call, "read"):
                await read(call)
            else:
                await call
        return status.error_from_status(caught.value, peer="router")


async def read(call: Any) -> tuple[str, list[int], pb.Finished]:
    """Read a whole reply; the stream must end with exactly one Finished."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    *deltas, last = responses
    assert last.WhichOneof("event") == "finished"
    assert all(response.WhichOneof("event") == "delta" for response in deltas)
    text = "".join(response.delta.text for response in deltas)
    return text, [token for response in deltas for token in response.delta.token_ids], last.finished


@contextlib.asynccontextmanager
async def running(num_prefill: int = 1, num_decode: int = 1, **config: Any) -> AsyncIterator[Cluster]:
    cluster = Cluster(num_prefill, num_decode, RouterConfig(port=0, **config))
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as started:
        await started.until_ready()
        yield started


# --- the way of one request --------------------------------------------------------------------------------


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


# --- chat, tokens, information -----------------------------------------------------------------------------


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


# --- bad input ---------------------------------------------------------------------------------------------


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


# --- ends of every kind ------------------------------------------------------------------------------------


async def test_the_decode_worker_refuses(cluster: Cluster) -> None:
    cluster.decode[0].refuse = CapacityError("256 requests are waiting")
    error = await cluster.refused(cluster.generate())
    assert isinstance(error, CapacityError) and "256 requests" in str(error)
    assert cluster.prefill[0].requests == []
    await cluster.until_idle()


async def test_the_prefill_worker_refuses_and_the_decode_worker_is_cancelled(cluster: Cluster) -> None:
    """Cases A2, B1, B3."""
    cluster.prefill[0].refuse = InvalidRequestError("token_ids", "5 tokens", "too long for this worker")
    error = await cluster.refused(cluster.generate())
    assert isinstance(error, InvalidRequestError) and "too long for this worker" in str(error)
    await cluster.until_idle()
    assert cluster.decode[0].num_cancelled == 1


async def test_a_failure_after_streaming_began_is_an_error_status(cluster: Cluster) -> None:
    """Case B2 and invariant 10."""
    cluster.decode[0].refuse_late = TransferError("checksum of block 1 differs")
    call = cluster.generate()
    assert (await call.read()).delta.text == "A"
    error = await cluster.refused(call)
    assert isinstance(error, TransferError) and "checksum" in str(error)
    await cluster.until_idle()


async def test_a_stream_that_ends_without_finished_is_an_error(cluster: Cluster) -> None:
    cluster.decode[0].skip_finished = True
    error = await cluster.refused(cluster.generate())
    assert isinstance(error, InternalError) and "without Finished" in str(error)
    await cluster.until_idle()


@pytest.mark.parametrize("stage", ["admission", "pages", "tokens", "end"])
@pytest.mark.parametrize("ending", ["cancel", "deadline"])
async def test_client_leaves_or_deadline_passes(cluster: Cluster, stage: str, ending: str) -> None:
    """Cases A11 and B7: every stage, everything freed, and the next request is not affected."""
    (p,), (d,) = cluster.prefill, cluster.decode
    worker = p if stage == "pages" else d
    gate = getattr(worker, stage)
    gate.shut()
    call = cluster.generate(timeout_s=0.3 if ending == "deadline" else 20.0)
    reading = asyncio.create_task(cluster.refused(call)) if ending == "deadline" else None
    async with asyncio.timeout(PATIENCE_S):
        await gate.reached.wait()
    if reading is None:
        call.cancel()
    else:
        error = await reading
        assert isinstance(error, DeadlineExceededError) and "0.3 s" in str(error)
    await cluster.until_idle()
    assert d.num_cancelled == 1
    gate.open()
    text, _, _ = await read(cluster.generate())
    assert text == "ABC"


async def test_client_leaves_while_the_prefill_workers_numbers_are_awaited(cluster: Cluster) -> None:
    cluster.prefill[0].end.shut()
    call = cluster.generate(max_tokens=1)
    await call.read()
    await cluster.until(lambda: cluster.decode[0].num_active == 0)
    call.cancel()
    await cluster.until_idle()
    assert cluster.prefill[0].num_cancelled == 1


async def test_numbers_that_never_come_do_not_fail_the_answer(cluster: Cluster) -> None:
    cluster.prefill[0].end.shut()
    text, _, finished = await read(cluster.generate(timeout_s=1.0))
    assert text == "ABC" and finished.usage.prefill_computed_tokens == 0
    await cluster.until_idle()


@pytest.mark.parametrize(
    ("role", "stage"),
    [("decode", "admission"), ("decode", "tokens"), ("prefill", "pages"), ("decode", "pages")],
)
async def test_a_worker_dies(cluster: Cluster, role: str, stage: str) -> None:
    (p,), (d,) = cluster.prefill, cluster.decode
    gate = getattr(p if stage == "pages" else d, stage)
    gate.shut()
    reading = asyncio.create_task(cluster.refused(cluster.generate()))
    async with asyncio.timeout(PATIENCE_S):
        await gate.reached.wait()
    victim, survivor = (p, d) if role == "prefill" else (d, p)
    await victim.stop()
    error = await reading
    assert isinstance(error, WorkerLostError) and victim.address in str(error)
    await cluster.until_idle()
    gate.open()
    assert survivor.num_active == 0


async def test_the_prefill_worker_dies_after_the_first_token_and_the_answer_is_complete(
    cluster: Cluster,
) -> None:
    (p,), (d,) = cluster.prefill, cluster.decode
    p.end.shut()
    d.tokens.shut()
    call = cluster.generate()
    assert (await call.read()).delta.text == "A"
    await p.stop()
    d.tokens.open()
    text, _, _ = await read(call)
    assert text == "BC"
    await cluster.until_idle()


async def test_with_the_prefill_worker_gone_the_decode_worker_reads_prompts(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Case G12: a fallback that can be seen, in the log and in the answer."""
    await cluster.prefill[0].stop()
    await cluster.until(lambda: any(s.why_not for s in cluster.router.registry.snapshots()))
    _, _, finished = await read(cluster.generate())
    assert finished.prefill_worker == "" and finished.usage.decode_computed_tokens == 5
    assert "the decode worker reads the prompt" in caplog.text


async def test_a_restarted_worker_is_another_worker(cluster: Cluster) -> None:
    """Cases B10 and G3: its in-flight requests fail at once, new ones work, counts belong to the incarnation."""
    (d,) = cluster.decode
    for _ in range(3):
        d.tokens.shut()
        call = cluster.generate()
        await call.read()
        old = d.incarnation
        await d.restart()
        error = await cluster.refused(call)
        assert isinstance(error, WorkerLostError)
        d.tokens.open()
        await cluster.until(
            lambda: any(
                s.ref.incarnation == d.incarnation and not s.why_not
                for s in cluster.router.registry.snapshots()
            )
        )
        assert d.incarnation != old
        _, _, finished = await read(cluster.generate())
        assert finished.decode_worker == d.incarnation
        await cluster.until_idle()


async def test_an_incarnation_that_changes_behind_a_living_connection_fails_its_requests(
    cluster: Cluster,
) -> None:
    """A proxy may keep the connection while the process behind it is another one."""
    (d,) = cluster.decode
    d.tokens.shut()
    call = cluster.generate()
    await call.read()
    old, d.incarnation = d.incarnation, type(d.incarnation)("inc-replacement")
    error = await cluster.refused(call)
    assert isinstance(error, WorkerLostError)
    assert old in str(error) and "inc-replacement" in str(error)
    await cluster.until_idle()


async def test_a_worker_that_stops_answering_is_lost_although_its_connection_stands(cluster: Cluster) -> None:
    (d,) = cluster.decode
    d.tokens.shut()
    call = cluster.generate()
    await call.read()
    d.probes.shut()
    error = await cluster.refused(call)
    assert isinstance(error, WorkerLostError) and "is lost" in str(error)
    await cluster.until_idle()
    d.probes.open()
    await cluster.until_ready()


async def test_an_idle_worker_that_never_admits_is_not_waited_for() -> None:
    async with running(dispatch_timeout_s=0.1) as cluster:
        await cluster.until_ready()
        (d,) = cluster.decode
        d.admission.shut()
        error = await cluster.refused(cluster.generate())
        assert isinstance(error, WorkerLostError) and "did not admit" in str(error)
        await cluster.until_idle()


async def test_a_busy_worker_may_queue_a_request_for_longer_than_the_dispatch_timeout() -> None:
    async with running(dispatch_timeout_s=0.05) as cluster:
        await cluster.until_ready()
        (d,) = cluster.decode
        d.counts = pb.WorkerCounts(num_running=8, num_waiting=1)
        d.admission.shut()
        call = cluster.generate()
        for _ in range(4):
            d.probes.reached.clear()
            async with asyncio.timeout(PATIENCE_S):
                await d.probes.reached.wait()
        await asyncio.sleep(0.3)
        d.admission.open()
        text, _, _ = await read(call)
        assert text == "ABC"


async def test_a_bug_of_a_worker_is_reported_as_such(cluster: Cluster) -> None:
    async def nonsense(request: worker_pb2.DecodeRequest, context: Any) -> None:
        await context.write(worker_pb2.DecodeEvent(delta=pb.Delta(text="early", token_ids=[1])))
        await asyncio.Event().wait()

    cluster.decode[0].on_decode = nonsense
    error = await cluster.refused(cluster.generate(request_id="odd"))
    assert isinstance(error, InternalError)
    assert "odd" in str(error) and "DeltaArrived while admitting" in str(error)
    await cluster.until_idle()


async def test_an_event_from_the_future_is_reported_as_such(cluster: Cluster) -> None:
    async def nonsense(request: worker_pb2.DecodeRequest, context: Any) -> None:
        await context.write(worker_pb2.DecodeEvent())
        await asyncio.Event().wait()

    cluster.decode[0].on_decode = nonsense
    assert isinstance(await cluster.refused(cluster.generate()), InternalError)
    await cluster.until_idle()


# --- members -----------------------------------------------------------------------------------------------


async def test_a_worker_with_another_identity_is_not_used_and_the_field_is_named() -> None:
    async with running(num_decode=2) as cluster:
        await cluster.until_ready()
        odd = FakeWorker("decode", cluster.decode[0].wire, identity=make_identity(k_dtype="bfloat16"))
        await odd.start()
        cluster.router.set_members([*cluster.members(), Member("decode", odd.address)])
        await cluster.until(lambda: "k_dtype" in cluster.router.registry.snapshots()[-1].why_not)
        assert "'bfloat16'" in cluster.router.registry.snapshots()[-1].why_not
        info = await cluster.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
        assert [w.healthy for w in info.workers] == [True, True, True, False]
        for _ in range(4):
            await read(cluster.generate())
        assert odd.requests == []
        await odd.stop()


async def test_a_fleet_may_change_to_another_model_once_nobody_has_the_old_one() -> None:
    async with running(num_prefill=0) as cluster:
        await cluster.until_ready()
        (d,) = cluster.decode
        d.identity, d.served_name = make_identity(weights_digest="v" * 64), "new"
        await d.restart()

        async def is_listed() -> bool:
            return [m.name for m in (await cluster.stub.ListModels(pb.ListModelsRequest())).models] == ["new"]

        await eventually(is_listed)
        await cluster.until_ready()
        await read(cluster.generate(model="new"))
        assert isinstance(await cluster.refused(cluster.generate(model="tiny")), ModelNotFoundError)


async def test_a_worker_in_the_wrong_role_is_not_used() -> None:
    async with running(num_prefill=0) as cluster:
        await cluster.until_ready()
        stray = FakeWorker("prefill")
        await stray.start()
        cluster.router.set_members([*cluster.members(), Member("decode", stray.address)])
        await cluster.until(lambda: "WORKER_ROLE_PREFILL" in cluster.router.registry.snapshots()[-1].why_not)
        await stray.stop()


async def test_a_removed_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    """Case G11."""
    async with running(num_prefill=0, num_decode=2) as cluster:
        await cluster.until_ready()
        first, second = cluster.decode
        first.tokens.shut()
        second.tokens.shut()
        calls = [cluster.generate(), cluster.generate()]
        for call in calls:
            await call.read()
        cluster.router.set_members([Member("decode", second.address)])
        first.tokens.open()
        second.tokens.open()
        for call in calls:
            assert (await read(call))[0] == "BC"
        await cluster.until(lambda: len(cluster.router.registry.snapshots()) == 1)
        await read(cluster.generate())
        assert (len(first.requests), len(second.requests)) == (1, 2)
        # And it may come back.
        cluster.router.set_members(cluster.members())
        await cluster.until_ready()


async def test_members_come_and_go_under_load() -> None:
    """Case G10: no request breaks because the list of workers changes."""
    async with running(num_prefill=2, num_decode=2) as cluster:
        await cluster.until_ready()
        everyone = cluster.members()

        async def churn() -> None:
            while True:
                for gone in everyone:
                    cluster.router.set_members([member for member in everyone if member != gone])
                    await asyncio.sleep(0)
                    cluster.router.set_members(everyone)
                    await cluster.until_ready()

        churning = asyncio.create_task(churn())
        for _ in range(10):
            await asyncio.gather(*(read(cluster.generate()) for _ in range(5)))
        churning.cancel()
        await cluster.until_idle()


async def test_one_address_cannot_have_two_roles(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="a worker has one role"):
        cluster.router.set_members([Member("prefill", "127.0.0.1:1"), Member("decode", "127.0.0.1:1")])


# --- the process -------------------------------------------------------------------------------------------


async def test_a_port_in_use_is_a_configuration_error(cluster: Cluster) -> None:
    port = int(cluster.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"router.port={port}: in use; choose another with --port"):
        await RouterServer(RouterConfig(port=port)).start()


async def test_stop_lets_requests_end_and_is_idempotent() -> None:
    async with running() as cluster:
        await cluster.until_ready()
        cluster.decode[0].tokens.shut()
        call = cluster.generate()
        await call.read()
        stopping = asyncio.create_task(cluster.router.stop(PATIENCE_S))
        cluster.decode[0].tokens.open()
        assert (await read(call))[0] == "BC"
        await stopping
        await cluster.router.stop(0.0)


async def test_stop_cancels_what_does_not_end() -> None:
    async with running() as cluster:
        await cluster.until_ready()
        cluster.decode[0].tokens.shut()
        call = cluster.generate()
        await call.read()
        await cluster.router.stop(0.0)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await read(call)
        await cluster.until(lambda: all(worker.num_active == 0 for worker in cluster.workers))


def test_importing_the_router_loads_no_torch() -> None:
    code = (
        "import sys, phasor.router, phasor.router.server, phasor.router.__main__\n"
        "heavy = {'torch', 'triton', 'ray', 'transformers', 'phasor.engine', 'phasor.transport', 'phasor.kernels'}\n"
        "found = heavy & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_the_command_serves_and_stops_on_sigterm() -> None:
    worker = FakeWorker("decode")
    await worker.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "phasor.router", "--decode", worker.address, "--port", "0",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(60):
        address = json.loads(await process.stdout.readline())["address"]
        async with channels.connect(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                pb.GenerateRequest(prompt="hi", sampling=pb.SamplingParams(max_tokens=2))
            )
            assert (await read(call))[0] == "AB"
        process.send_signal(signal.SIGTERM)
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert b"Traceback" not in errors
    await worker.stop()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--decode"),
        (["--decode", "nowhere"], "must be host:port"),
        (["--decode", "127.0.0.1:1", "--port", "99999"], "port"),
        (["--decode", "127.0.0.1:1", "--port", "many"], "--port"),
        (["--decode", "127.0.0.1:1", "--prefil", "127.0.0.1:2", "--nonsense"], "--nonsense"),
        (["--decode", "127.0.0.1:1", "--prefill", "127.0.0.1:1", "--port", "0"], "one role"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments: list[str], text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phasor.router", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 2
    assert text in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stdout == ""


async def test_the_command_with_a_port_in_use_exits_with_2_and_one_line(cluster: Cluster) -> None:
    port = cluster.address.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "phasor.router", "--decode", "127.0.0.1:1", "--port", port,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode().splitlines() == [
        f"python -m phasor.router: router.port={port}: in use; choose another with --port"
    ]
