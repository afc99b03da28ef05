"""The blocking client. A `Client` may be used from many threads; a `Reply` is read by one, closed by any."""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from phasor.client import messages as wire
from phasor.client.calls import ReplyCalls
from phasor.client.types import DEFAULT_ADDRESS, Completion, Event, ModelCard, ServerInfo
from phasor.v1 import inference_pb2 as pb
from phasor.wire.channels import connect_sync


class Reply(wire.ReplyState, Iterator[Event]):
    """A reply as it arrives: any number of Delta, then one Finished. Iterating blocks; closing early cancels.

    Use it as a context manager, or read it to its end, so that the server stops when you stop caring.
    A KeyboardInterrupt in the middle of a read can leave gRPC's own locks held: end the program then, or go on with
    a new `Client`. A program that survives Ctrl-C as a matter of course should use `AsyncClient`.
    """

    def __init__(self, call: Any, address: str) -> None:
        super().__init__()
        self._call, self._address, self._over = call, address, False

    def __next__(self) -> Event:
        """Return the next event.

        Raises:
            PhasorError: what the server refused or lost.
        """
        if self._over:
            raise StopIteration
        try:
            return self.feed(next(self._call))
        except StopIteration:
            self._over = True
            self.check_end()
            raise
        except grpc.RpcError as exc:
            if self._over:  # closed by another thread while we waited
                raise StopIteration from exc
            self._over = True
            raise wire.error_from_call(exc, self._address) from exc
        except BaseException:
            self.close()
            raise

    def complete(self) -> Completion:
        """Read to the end and return the whole reply; raises as iterating does."""
        for _ in self:
            pass
        return self.completion()

    def close(self) -> None:
        """Cancel the call if it is not over. Idempotent, does not block."""
        self._over = True
        self._call.cancel()

    def __enter__(self) -> Self:
        """Return itself; leaving closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


class Client(ReplyCalls[Reply]):
    """A connection to one Phasor server. Connects on the first call; close it, or use it in a `with`.

    Args:
        address: host:port of the server.
        timeout_s: deadline of a reply for calls that name none.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, timeout_s: float = wire.DEFAULT_TIMEOUT_S) -> None:
        super().__init__(connect_sync(address), address, timeout_s, Reply)

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[wire.MessageLike] | None = None,
        model: str = "",
    ) -> list[int]:
        """Return the token ids of a text, or of messages as `chat` would send them to the model."""
        request = wire.tokenize_request(text, messages, model=model)
        return list(self._unary(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Return the text of token ids."""
        request = wire.detokenize_request(token_ids, model=model)
        return str(self._unary(self._stub.Detokenize, request).text)

    def list_models(self) -> list[ModelCard]:
        """Return the served models."""
        return wire.model_cards(self._unary(self._stub.ListModels, pb.ListModelsRequest()))

    def server_info(self) -> ServerInfo:
        """Return identity, limits, rope and workers of the server."""
        return wire.server_info(self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest()))

    def close(self) -> None:
        """Close the connection; calls under way are cancelled. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        """Return itself; leaving closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _unary(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=wire.UNARY_TIMEOUT_S)
        except grpc.RpcError as exc:
            raise wire.error_from_call(exc, self.address) from exc
