"""A router with fake workers and a client, for tests of the router."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from phasor.core.config import RouterConfig
from phasor.core.errors import (
    PhasorError,
)
from phasor.router.registry import Member, RegistryTimings
from phasor.router.server import RouterServer
from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc
from phasor.wire import channels, status
from tests.helpers.fake_workers import FakeWire, FakeWorker

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
