"""How a reply is asked for: the part of both clients that does not wait for anything."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, Unpack

from phasor.client import messages as wire
from phasor.v1 import inference_pb2_grpc

ReplyT = TypeVar("ReplyT")


class ReplyCalls(Generic[ReplyT]):
    """Starts calls that stream a reply. Starting one never blocks and is not a coroutine: iterate the result.

    Args:
        channel: a blocking or an asyncio channel; the subclass closes it.
        address: for messages.
        timeout_s: deadline of a reply for calls that name none.
        reply: wraps a started call.
    """

    def __init__(self, channel: Any, address: str, timeout_s: float, reply: type[ReplyT]) -> None:
        self.address = address
        self._channel = channel
        self._stub: Any = inference_pb2_grpc.InferenceStub(channel)
        self._timeout_s = timeout_s
        self._reply: Any = reply

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        timeout_s: float | None = None,
        request_id: str = "",
        **sampling: Unpack[wire.SamplingOptions],
    ) -> ReplyT:
        """Continue a prompt, given as text or as token ids.

        Args:
            prompt: text; or give `token_ids`.
            token_ids: the prompt as ids.
            model: empty means the served model.
            timeout_s: deadline of the whole reply.
            request_id: for logs; drawn by the server if empty.
            sampling: see `SamplingOptions`.

        Raises:
            InvalidRequestError: a value does not fit its field. What the server refuses is raised on reading.
        """
        request = wire.generate_request(
            prompt,
            token_ids,
            model=model,
            timeout_s=self._limit(timeout_s),
            request_id=request_id,
            **sampling,
        )
        return self._start(self._stub.Generate, request)

    def chat(
        self,
        messages: Sequence[wire.MessageLike],
        *,
        model: str = "",
        timeout_s: float | None = None,
        request_id: str = "",
        **sampling: Unpack[wire.SamplingOptions],
    ) -> ReplyT:
        """Answer messages, laid out by the model's own chat template; arguments and errors as `generate`."""
        request = wire.chat_request(
            messages, model=model, timeout_s=self._limit(timeout_s), request_id=request_id, **sampling
        )
        return self._start(self._stub.Chat, request)

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    def _start(self, method: Any, request: Any) -> ReplyT:
        call = method(request, timeout=wire.rpc_timeout_s(request.timeout_s))
        reply: ReplyT = self._reply(call, self.address)
        return reply
