"""The asyncio client: the same calls as `phasor.client.blocking`, awaited. Belongs to the loop it was made in."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from phasor.client import messages as wire
from phasor.client.calls import ReplyCalls
from phasor.client.types import DEFAULT_ADDRESS, Completion, Event, ModelCard, ServerInfo
from phasor.v1 import inference_pb2 as pb
from phasor.wire.channels import connect


class AsyncReply(wire.ReplyState, AsyncIterator[Event]):
    """A reply as it arrives: any number of Delta, then one Finished. Closing early, or cancelling a read, cancels it.

    Use it as a context manager, or read it to its end, so that the server stops when you stop caring.
    """

    def __init__(self, call: Any, address: str) -> None:
        super().__init__()
        self._call, self._address, self._over = call, address, False

    async def __anext__(self) -> Event:
        """Return the next event.

        Raises:
            PhasorError: what the server refused or lost.
        """
        if self._over:
            raise StopAsyncIteration
        try:
            response = await self._call.read()
            if response is grpc.aio.EOF:
                self._over = True
                self.check_end()
                raise StopAsyncIteration
            return self.feed(response)
        except grpc.RpcError as exc:
            self._over = True
            raise wire.error_from_call(exc, self._address) from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if self._over and not (task and task.cancelling()):
                raise StopAsyncIteration from exc  # closed by another task, not a cancelled one of ours
            self.close()
            raise
        except StopAsyncIteration:
            raise
        except BaseException:
            self.close()
            raise

    async def complete(self) -> Completion:
        """Read to the end and return the whole reply; raises as iterating does."""
        async for _ in self:
            pass
        return self.completion()

    def close(self) -> None:
        """Cancel the call if it is not over. Idempotent, does not block."""
        self._over = True
        self._call.cancel()

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return itself; leaving closes it."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


class AsyncClient(ReplyCalls[AsyncReply]):
    """A connection to one Phasor server. Make it inside a running loop; close it, or use it in an `async with`.

    Args:
        address: host:port of the server.
        timeout_s: deadline of a reply for calls that name none.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, timeout_s: float = wire.DEFAULT_TIMEOUT_S) -> None:
        super().__init__(connect(address), address, timeout_s, AsyncReply)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[wire.MessageLike] | None = None,
        model: str = "",
    ) -> list[int]:
        """Return the token ids of a text, or of messages as `chat` would send them to the model."""
        request = wire.tokenize_request(text, messages, model=model)
        return list((await self._unary(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Return the text of token ids."""
        request = wire.detokenize_request(token_ids, model=model)
        return str((await self._unary(self._stub.Detokenize, request)).text)

    async def list_models(self) -> list[ModelCard]:
        """Return the served models."""
        return wire.model_cards(await self._unary(self._stub.ListModels, pb.ListModelsRequest()))

    async def server_info(self) -> ServerInfo:
        """Return identity, limits, rope and workers of the server."""
        return wire.server_info(await self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest()))

    async def close(self) -> None:
        """Close the connection; calls under way are cancelled. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        """Return itself; leaving closes it."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def _unary(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return await method(request, timeout=wire.UNARY_TIMEOUT_S)
        except grpc.RpcError as exc:
            raise wire.error_from_call(exc, self.address) from exc
