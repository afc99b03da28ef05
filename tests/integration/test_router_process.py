"""The router as a process: start, stop, command line, imports."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from phasor.core.config import RouterConfig
from phasor.core.errors import (
    ConfigError,
)
from phasor.router.server import RouterServer
from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc
from phasor.wire import channels
from tests.helpers.fake_workers import FakeWorker
from tests.helpers.router_cluster import PATIENCE_S, Cluster, read, running


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as started:
        await started.until_ready()
        yield started


async def test_a_port_in_use_is_a_configuration_error(cluster: Cluster) -> None:
    port = int(cluster.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"router.port={port}: in use; choose another with --port"):
        await RouterServer(RouterConfig(port=port)).start()


async def test_metrics_are_served_where_the_server_says_until_it_stops() -> None:
    server = RouterServer(RouterConfig(port=0))
    address = await server.start()
    async with channels.connect(address) as channel:
        info = await inference_pb2_grpc.InferenceStub(channel).GetServerInfo(pb.GetServerInfoRequest())
    assert info.metrics_address == server.metrics_address
    host, _, port = server.metrics_address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    await writer.wait_closed()
    await server.stop(0.0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


async def test_metrics_may_be_off_and_a_metrics_port_in_use_is_a_configuration_error(
    cluster: Cluster,
) -> None:
    server = RouterServer(RouterConfig(port=0, metrics_port="off"))
    await server.start()
    assert server.metrics_address == ""
    await server.stop(0.0)
    port = int(cluster.router.metrics_address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"metrics_port={port}: cannot listen"):
        await RouterServer(RouterConfig(port=0, metrics_port=port)).start()


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
