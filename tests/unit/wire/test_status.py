"""Errors across a real gRPC server on loopback: the caller raises what the server raised, and never more."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from phasor.core import errors
from phasor.core.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    LinkMismatchError,
    ModelNotFoundError,
    PhasorError,
    RequestCancelledError,
    TransferTimeoutError,
    WorkerLostError,
)
from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc as pb_grpc
from phasor.wire.channels import connect, new_server
from phasor.wire.status import ERROR_METADATA_KEY, error_from_status, errors_to_status

TIMEOUT_S = 20.0


class FailingService(pb_grpc.InferenceServicer):
    """Runs `act` inside the boundary, in a unary and in a streaming call."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    async def ListModels(self, request, context):  # type: ignore[no-untyped-def]
        async with errors_to_status(context):
            self.act()
            return pb.ListModelsResponse()

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        async with errors_to_status(context):
            yield pb.GenerateResponse(request_id="first")
            self.act()


@asynccontextmanager
async def serving(act: Callable[[], None]) -> AsyncIterator[pb_grpc.InferenceStub]:
    server = new_server()
    pb_grpc.add_InferenceServicer_to_server(FailingService(act), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            yield pb_grpc.InferenceStub(channel)
    finally:
        await server.stop(None)


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


async def call(stub: pb_grpc.InferenceStub) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S)
    return caught.value


EXAMPLES = [
    InvalidRequestError("max_tokens", -1, "give 1 or more"),
    ModelNotFoundError("gpt", "smollm2"),
    CapacityError("9 blocks asked for, 8 exist", ever=True),
    ConfigError("port", 1, "in use"),
    LinkMismatchError("tier", 1.0, 2.0),
    TransferTimeoutError("silent for 5 s"),
    WorkerLostError("worker inc-1 is gone"),
    RequestCancelledError("the client went away"),
    DeadlineExceededError("passed after 3 s"),
    InvalidRequestError("prompt", "日本語\n\x00", "not text\nin two lines"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
async def test_the_caller_raises_what_the_server_raised(error: PhasorError) -> None:
    async with serving(raising(error)) as stub:
        rpc_error = await call(stub)
    assert rpc_error.code() is getattr(grpc.StatusCode, error.grpc_code)
    again = error_from_status(rpc_error, peer="worker")
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert again.retryable == error.retryable


async def test_an_error_after_the_stream_began_ends_it_with_a_status() -> None:
    received = []
    async with serving(raising(CapacityError("full"))) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for response in stub.Generate(pb.GenerateRequest(), timeout=TIMEOUT_S):
                received.append(response.request_id)
    assert received == ["first"]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(error_from_status(caught.value, peer="worker"), CapacityError)


async def test_an_unknown_exception_is_internal_and_leaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    secret = "/home/operator/weights password=hunter2"
    with caplog.at_level(logging.ERROR, logger="phasor.wire.status"):
        async with serving(raising(RuntimeError(secret))) as stub:
            rpc_error = await call(stub)
    assert rpc_error.code() is grpc.StatusCode.INTERNAL
    shown = (rpc_error.details() or "") + repr(list(rpc_error.trailing_metadata() or ()))
    assert "hunter2" not in shown
    assert "Traceback" not in shown
    assert "RuntimeError" in shown
    assert isinstance(error_from_status(rpc_error, peer="worker"), InternalError)
    # Logged once, with the stack that the caller does not see.
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None
    assert secret in caplog.text


async def test_a_call_without_error_is_left_alone() -> None:
    async with serving(lambda: None) as stub:
        assert await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S) == pb.ListModelsResponse()


async def test_a_server_that_is_not_there_is_a_lost_worker() -> None:
    server = new_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.stop(None)
    async with connect(f"127.0.0.1:{port}") as channel:
        rpc_error = await call(pb_grpc.InferenceStub(channel))
    error = error_from_status(rpc_error, peer=f"127.0.0.1:{port}")
    assert isinstance(error, WorkerLostError)
    assert f"127.0.0.1:{port} is unreachable" in str(error)
    assert error.retryable


async def test_a_server_that_dies_in_a_stream_is_a_lost_worker() -> None:
    class Endless(pb_grpc.InferenceServicer):
        async def Generate(self, request, context):  # type: ignore[no-untyped-def]
            yield pb.GenerateResponse(request_id="first")
            await server.stop(None)

    server = new_server()
    pb_grpc.add_InferenceServicer_to_server(Endless(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(), timeout=TIMEOUT_S):
                pass
    assert isinstance(error_from_status(caught.value, peer="worker"), WorkerLostError | RequestCancelledError)


async def test_an_unknown_method_is_an_internal_error_that_names_peer_and_status() -> None:
    server = new_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            rpc_error = await call(pb_grpc.InferenceStub(channel))
    finally:
        await server.stop(None)
    error = error_from_status(rpc_error, peer="decode worker")
    assert isinstance(error, InternalError)
    assert "decode worker: UNIMPLEMENTED" in str(error)


def foreign(code: grpc.StatusCode, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.aio.AioRpcError:
    """What a peer that is not Phasor, or a broken one, makes a call raise."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details="why")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.CANCELLED, RequestCancelledError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, CapacityError),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (grpc.StatusCode.UNAVAILABLE, WorkerLostError),
        (grpc.StatusCode.INTERNAL, InternalError),
        (grpc.StatusCode.DATA_LOSS, InternalError),
    ],
)
def test_a_bare_status_becomes_the_nearest_error(code: grpc.StatusCode, expected: type[PhasorError]) -> None:
    assert type(error_from_status(foreign(code), peer="worker")) is expected


@pytest.mark.parametrize(
    "detail",
    ["", "{", "[]", "null", '"text"', '{"type": "InternalError"}', '{"type": "InternalError", "fields": 3}'],
)
def test_a_broken_detail_is_an_internal_error(detail: str) -> None:
    error = error_from_status(
        foreign(grpc.StatusCode.UNAVAILABLE, ((ERROR_METADATA_KEY, detail),)), peer="worker"
    )
    assert type(error) is InternalError
    assert str(error) == "why"


@pytest.mark.parametrize("name", ["SystemExit", "OSError", "Nonsense", "PhasorError"])
def test_a_detail_can_only_name_our_own_errors(name: str) -> None:
    detail = f'{{"type": "{name}", "fields": {{}}}}'
    error = error_from_status(
        foreign(grpc.StatusCode.INTERNAL, ((ERROR_METADATA_KEY, detail),)), peer="worker"
    )
    assert isinstance(error, PhasorError)
    assert type(error) is getattr(errors, name, InternalError)
