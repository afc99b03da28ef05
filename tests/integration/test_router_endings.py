"""Every way a request can end: what the client sees, and that nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from phasor.core.errors import (
    CapacityError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    TransferError,
    WorkerLostError,
)
from phasor.v1 import inference_pb2 as pb
from phasor.v1 import worker_pb2
from tests.helpers.router_cluster import PATIENCE_S, Cluster, read, running


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as started:
        await started.until_ready()
        yield started


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


async def test_a_client_that_does_not_read_holds_nothing_past_the_deadline(cluster: Cluster) -> None:
    async def flood(request: worker_pb2.DecodeRequest, context: Any) -> None:
        await context.write(worker_pb2.DecodeEvent(admitted=worker_pb2.Admitted()))
        while True:
            delta = pb.Delta(text="x" * 100_000, token_ids=[65])
            await context.write(worker_pb2.DecodeEvent(delta=delta))

    cluster.decode[0].on_decode = flood
    request = pb.GenerateRequest(prompt="x", timeout_s=0.5)
    call = cluster.stub.Generate(request, metadata=[("phasor-local-prefill", "1")])
    assert (await call.read()).HasField("delta")
    await cluster.until_idle()
    assert cluster.decode[0].num_cancelled == 1
    call.cancel()
