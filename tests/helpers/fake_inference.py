"""A small real `phasor.v1.Inference` server: its prompt says how it behaves. For the client and the command line."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from phasor.core.errors import CapacityError, InvalidRequestError, ModelNotFoundError, WorkerLostError
from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc
from phasor.wire.channels import new_server
from phasor.wire.status import errors_to_status

SERVED = "fake"
START_S = 10.0


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Repeats the prompt's words, unless the prompt is one of the words below."""

    address: str

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.released = threading.Event()
        """Set when a hanging reply was cancelled by its client."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        ids = list(request.token_ids.ids) if request.HasField("token_ids") else None
        async with errors_to_status(context):
            async for response in self._reply(request, request.prompt, ids):
                yield response

    async def Chat(self, request: pb.ChatRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        async with errors_to_status(context):
            async for response in self._reply(request, request.messages[-1].content, None):
                yield response

    async def _reply(
        self, request: Any, prompt: str, ids: list[int] | None
    ) -> AsyncIterator[pb.GenerateResponse]:
        if request.model not in ("", SERVED):
            raise ModelNotFoundError(request.model, SERVED)
        if prompt == "refuse":
            raise InvalidRequestError("temperature", -1.0, "must be 0 or more")
        if prompt == "full":
            raise CapacityError("256 requests wait already", ever=False)
        if prompt == "unknown":
            yield pb.GenerateResponse(request_id="r-1")
        words = [str(i) for i in ids] if ids is not None else prompt.split()
        for index, word in enumerate(words):
            delta = pb.Delta(text=word if index == 0 else " " + word, token_ids=[100 + index])
            yield pb.GenerateResponse(request_id=request.request_id or "r-1", delta=delta)
        if prompt == "lost":
            raise WorkerLostError("decode worker 1234 fell silent")
        if prompt == "truncate":
            return
        if prompt == "hang":
            try:
                await asyncio.sleep(3600)
            finally:
                self.released.set()
        yield pb.GenerateResponse(request_id=request.request_id or "r-1", finished=_finished(len(words)))
        if prompt == "chatty":
            yield pb.GenerateResponse(request_id="r-1", delta=pb.Delta(text="more"))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self.requests.append(request)
        text = request.text or "".join(f"{m.role}:{m.content};" for m in request.messages.messages)
        return pb.TokenizeResponse(token_ids=list(text.encode()))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        async with errors_to_status(context):
            if max(request.token_ids, default=0) > 255:
                raise InvalidRequestError(
                    "token_ids[0]", max(request.token_ids), "the vocabulary has 256 tokens"
                )
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[_card()])

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        identity = pb.Identity(
            weights_digest="ab" * 32, k_dtype="float32", layers=[0, 1], num_kv_heads=2, tier=1.0
        )
        counts = pb.WorkerCounts(num_blocks=64, num_free_blocks=60, bytes_transferred_total=5_000_000_000)
        workers = [
            pb.WorkerSummary(
                role=pb.WORKER_ROLE_PREFILL, address="127.0.0.1:1", incarnation="aaaa", healthy=True
            ),
            pb.WorkerSummary(
                role=pb.WORKER_ROLE_DECODE, address="127.0.0.1:2", incarnation="bbbb", counts=counts
            ),
        ]
        rope = pb.RopeSummary(
            scheme="default", theta=1e4, rotary_dim=32, trained_positions=256, max_positions=256
        )
        return pb.GetServerInfoResponse(
            version="9.9", model=_card(), identity=identity, rope=rope, workers=workers
        )


def _card() -> pb.ModelCard:
    return pb.ModelCard(name=SERVED, max_model_len=256, dtype="float32", weights_digest="ab" * 32)


def _finished(num_tokens: int) -> pb.Finished:
    return pb.Finished(
        finish_reason=pb.FINISH_REASON_STOP,
        stop_string="END",
        usage=pb.Usage(
            prompt_tokens=7, completion_tokens=num_tokens, cached_tokens=4, transferred_bytes=1_500_000
        ),
        timing=pb.Timing(queue_s=0.25, first_token_s=0.5, total_s=1.5),
        rope_tier=1.0,
        prefill_worker="aaaa",
        decode_worker="bbbb",
    )


@contextmanager
def fake_server() -> Iterator[FakeInference]:
    """Run the server on a free port, on a loop in a thread of its own."""
    servicer = FakeInference()
    started: Future[str] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = new_server()
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        started.set_result(f"127.0.0.1:{port}")
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        servicer.address = started.result(START_S)
        yield servicer
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)
        loop.close()
