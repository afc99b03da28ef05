"""Both clients against a real gRPC server: the same calls, the same answers, the same errors."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from phasor.client import AsyncClient, Client, Completion, Delta, Finished, Message
from phasor.core.errors import (
    CapacityError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    WorkerLostError,
)
from phasor.core.request import FinishReason
from tests.helpers.fake_inference import SERVED, FakeInference, fake_server

WAIT_S = 10.0


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FakeInference]:
    with fake_server() as server:
        yield server


@pytest.fixture
def server(shared_server: FakeInference) -> FakeInference:
    shared_server.requests.clear()
    shared_server.released.clear()
    return shared_server


class Blocking:
    """The calls of one client, awaited here if they must be."""

    def __init__(self, address: str) -> None:
        self._address = address

    def unary(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with Client(self._address) as client:
            return getattr(client, name)(*args, **kwargs)

    def events(self, name: str, *args: Any, **kwargs: Any) -> list[Delta | Finished]:
        with Client(self._address) as client:
            return list(getattr(client, name)(*args, **kwargs))

    def complete(self, name: str, *args: Any, **kwargs: Any) -> Completion:
        with Client(self._address) as client:
            return getattr(client, name)(*args, **kwargs).complete()


class Asyncio:
    """As `Blocking`, over `AsyncClient`."""

    def __init__(self, address: str) -> None:
        self._address = address

    def unary(self, name: str, *args: Any, **kwargs: Any) -> Any:
        async def call() -> Any:
            async with AsyncClient(self._address) as client:
                return await getattr(client, name)(*args, **kwargs)

        return asyncio.run(call())

    def events(self, name: str, *args: Any, **kwargs: Any) -> list[Delta | Finished]:
        async def call() -> list[Delta | Finished]:
            async with AsyncClient(self._address) as client:
                return [event async for event in getattr(client, name)(*args, **kwargs)]

        return asyncio.run(call())

    def complete(self, name: str, *args: Any, **kwargs: Any) -> Completion:
        async def call() -> Completion:
            async with AsyncClient(self._address) as client:
                return await getattr(client, name)(*args, **kwargs).complete()

        return asyncio.run(call())


Calls = Blocking | Asyncio


@pytest.fixture(params=[Blocking, Asyncio])
def calls(request: pytest.FixtureRequest, server: FakeInference) -> Calls:
    make: Callable[[str], Calls] = request.param
    return make(server.address)


def test_generate_streams_events_and_ends_with_finished(calls: Calls) -> None:
    *deltas, end = calls.events("generate", "the sea is blue")
    assert [d.text for d in deltas] == ["the", " sea", " is", " blue"]
    assert [d.token_ids for d in deltas] == [(100,), (101,), (102,), (103,)]
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.stop_string, end.rope_tier) == (FinishReason.STOP, "END", 1.0)
    assert (end.usage.prompt_tokens, end.usage.cached_tokens, end.usage.completion_tokens) == (7, 4, 4)
    assert (end.timing.queue_s, end.timing.first_token_s, end.timing.total_s) == (0.25, 0.5, 1.5)
    assert (end.prefill_worker, end.decode_worker) == ("aaaa", "bbbb")


def test_generate_takes_token_ids_and_options(calls: Calls, server: FakeInference) -> None:
    whole = calls.complete(
        "generate",
        token_ids=[5, 6],
        max_tokens=3,
        temperature=0.0,
        stop="x",
        timeout_s=9.0,
        request_id="mine",
    )
    assert (whole.text, whole.token_ids, whole.request_id) == ("5 6", (100, 101), "mine")
    (request,) = server.requests
    assert (request.timeout_s, request.sampling.max_tokens, list(request.sampling.stop)) == (9.0, 3, ["x"])


def test_chat_sends_the_messages(calls: Calls, server: FakeInference) -> None:
    whole = calls.complete("chat", [Message("system", "be brief"), {"role": "user", "content": "good day"}])
    assert whole.text == "good day"
    assert [m.role for m in server.requests[0].messages] == ["system", "user"]


def test_tokenize_and_detokenize(calls: Calls) -> None:
    assert calls.unary("tokenize", "hi") == [104, 105]
    assert bytes(calls.unary("tokenize", messages=[Message("user", "x")])) == b"user:x;"
    assert calls.unary("detokenize", [104, 105]) == "hi"
    with pytest.raises(InvalidRequestError) as caught:
        calls.unary("detokenize", [256])
    assert caught.value.field == "token_ids[0]"


def test_list_models_and_server_info(calls: Calls) -> None:
    (card,) = calls.unary("list_models")
    assert (card.name, card.max_model_len, card.dtype) == (SERVED, 256, "float32")
    info = calls.unary("server_info")
    assert (info.version, info.model, info.rope.theta, info.identity.layers) == ("9.9", card, 1e4, (0, 1))
    assert [(w.role, w.healthy) for w in info.workers] == [("prefill", True), ("decode", False)]
    assert info.workers[1].counts.bytes_transferred_total == 5_000_000_000


def test_the_servers_refusals_arrive_as_they_were_raised(calls: Calls) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        calls.complete("generate", "refuse")
    assert (refused.value.field, refused.value.value) == ("temperature", -1.0)
    with pytest.raises(ModelNotFoundError) as unknown:
        calls.complete("chat", [Message("user", "x")], model="other")
    assert (unknown.value.model, unknown.value.served) == ("other", SERVED)
    with pytest.raises(CapacityError) as full:
        calls.complete("generate", "full")
    assert full.value.ever is False


def test_a_worker_lost_in_mid_stream_is_an_error_after_the_text(calls: Calls) -> None:
    with pytest.raises(WorkerLostError, match="1234 fell silent"):
        calls.complete("generate", "lost")


@pytest.mark.parametrize("prompt", ["truncate", "chatty", "unknown"])
def test_a_stream_that_breaks_the_protocol_is_no_answer(calls: Calls, prompt: str) -> None:
    with pytest.raises(InternalError):
        calls.complete("generate", prompt)


def test_a_deadline_passes_at_a_silent_server(calls: Calls, server: FakeInference, monkeypatch) -> None:
    monkeypatch.setattr("phasor.client.messages._SERVER_FIRST_S", 0.0)
    with pytest.raises(DeadlineExceededError):
        calls.complete("generate", "hang", timeout_s=0.3)
    assert server.released.wait(WAIT_S)


def test_no_server_is_an_error_with_the_way_out() -> None:
    with socket.socket() as taken:  # bound, never listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for calls in (Blocking(address), Asyncio(address)):
            with pytest.raises(WorkerLostError, match="phasor serve"):
                calls.complete("generate", "x")
            with pytest.raises(WorkerLostError, match="phasor serve"):
                calls.unary("server_info")


def test_leaving_a_blocking_reply_early_cancels_it(server: FakeInference) -> None:
    with Client(server.address) as client:
        with client.generate("hang") as reply:
            assert next(reply) == Delta(text="hang", token_ids=(100,))
        assert server.released.wait(WAIT_S)
        assert list(reply) == []
        assert (reply.text, reply.request_id, reply.finished) == ("hang", "r-1", None)
        with pytest.raises(InternalError, match="closed before its end"):
            reply.complete()


def test_closing_a_blocking_reply_from_another_thread_ends_the_reader(server: FakeInference) -> None:
    with Client(server.address) as client:
        reply = client.generate("hang")
        next(reply)
        # Whether the reader waits already when it is closed, or comes later, it must end quietly.
        closing = threading.Timer(0.05, reply.close)
        closing.start()
        assert list(reply) == []
        closing.join()
        assert server.released.wait(WAIT_S)


async def test_leaving_an_asyncio_reply_early_cancels_it(server: FakeInference) -> None:
    async with AsyncClient(server.address) as client:
        async with client.generate("hang") as reply:
            assert await anext(reply) == Delta(text="hang", token_ids=(100,))
        assert await asyncio.to_thread(server.released.wait, WAIT_S)
        assert [event async for event in reply] == []
        with pytest.raises(InternalError, match="closed before its end"):
            await reply.complete()


async def test_cancelling_the_reading_task_cancels_the_call(server: FakeInference) -> None:
    async with AsyncClient(server.address) as client:
        reply = client.generate("hang")
        await anext(reply)
        reading = asyncio.create_task(reply.complete())
        await asyncio.sleep(0)  # let it start to read
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await asyncio.to_thread(server.released.wait, WAIT_S)


async def test_closing_an_asyncio_reply_from_another_task_ends_the_reader(server: FakeInference) -> None:
    async with AsyncClient(server.address) as client:
        reply = client.generate("hang")
        await anext(reply)

        async def rest() -> list[Any]:
            return [event async for event in reply]

        reading = asyncio.create_task(rest())
        await asyncio.sleep(0)
        reply.close()
        assert await asyncio.wait_for(reading, WAIT_S) == []
