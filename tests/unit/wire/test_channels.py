"""Channels and servers: a port in use is an error at start, and messages of a long prompt fit."""

import asyncio

import pytest

from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc as pb_grpc
from phasor.wire.channels import connect, connect_sync, new_server

TIMEOUT_S = 20.0


class CountingService(pb_grpc.InferenceServicer):
    """Answers Detokenize with how many ids arrived."""

    async def Detokenize(self, request, context):  # type: ignore[no-untyped-def]
        return pb.DetokenizeResponse(text=str(len(request.token_ids)))


async def test_a_port_in_use_is_an_error_at_start() -> None:
    first, second = new_server(), new_server()
    port = first.add_insecure_port("127.0.0.1:0")
    await first.start()
    try:
        with pytest.raises(RuntimeError, match=str(port)):
            second.add_insecure_port(f"127.0.0.1:{port}")
    finally:
        await first.stop(None)
        await second.stop(None)


async def test_a_message_over_grpc_s_own_limit_of_4_mib_passes() -> None:
    server = new_server()
    pb_grpc.add_InferenceServicer_to_server(CountingService(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            request = pb.DetokenizeRequest(token_ids=[2**31 - 1] * 1_000_000)
            assert request.ByteSize() > 4 * 2**20
            reply = await pb_grpc.InferenceStub(channel).Detokenize(request, timeout=TIMEOUT_S)
    finally:
        await server.stop(None)
    assert reply.text == "1000000"


async def test_a_blocking_channel_reaches_an_asyncio_server() -> None:
    server = new_server()
    pb_grpc.add_InferenceServicer_to_server(CountingService(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    def call() -> str:
        with connect_sync(f"127.0.0.1:{port}") as channel:
            request = pb.DetokenizeRequest(token_ids=[1, 2])
            return str(pb_grpc.InferenceStub(channel).Detokenize(request, timeout=TIMEOUT_S).text)

    try:
        assert await asyncio.to_thread(call) == "2"
    finally:
        await server.stop(None)
