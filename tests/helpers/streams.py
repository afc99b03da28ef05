"""A Generate call that goes on beside the test: read in a thread, left at any moment, asked how it ended."""

import threading
import time
from collections.abc import Sequence

import grpc

from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc

LOCAL = (("phasor-local-prefill", "1"),)
"""Metadata with which the decode worker reads the prompt itself."""


class Stream:
    """One call in progress. Collects tokens; `end` waits for its end."""

    def __init__(
        self,
        address: str,
        prompt: str | Sequence[int],
        sampling: pb.SamplingParams,
        *,
        timeout_s: float = 60.0,
        local: bool = False,
        request_id: str = "",
    ) -> None:
        self._channel = grpc.insecure_channel(address)
        request = pb.GenerateRequest(sampling=sampling, timeout_s=timeout_s, request_id=request_id)
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.token_ids.ids.extend(prompt)
        self.call = inference_pb2_grpc.InferenceStub(self._channel).Generate(
            request, timeout=timeout_s + 10, metadata=LOCAL if local else ()
        )
        self.first = threading.Event()
        """Set with the first delta, or with the end."""
        self.token_ids: list[int] = []
        """Of all replies, as they came."""
        self.replies: dict[int, list[int]] = {}
        """Token ids of each reply."""
        self.finished: pb.Finished | None = None
        self.error: grpc.RpcError | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def code(self) -> grpc.StatusCode:
        """The status; only after `end`."""
        return grpc.StatusCode.OK if self.error is None else self.error.code()

    @property
    def details(self) -> str:
        return "" if self.error is None else self.error.details() or ""

    def cancel(self) -> None:
        """Leave, as a client that loses interest."""
        self.call.cancel()

    def end(self, timeout_s: float) -> float:
        """Wait for the end; returns the seconds it took."""
        started_s = time.monotonic()
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the stream did not end within {timeout_s} s"
        self._channel.close()
        # Invariant 10: a status that is OK belongs to a complete answer only. (A complete answer may be without
        # one: left by its client between Finished and the status.)
        assert self.error is not None or self.finished is not None
        if self.finished is not None:
            assert self.finished.usage.completion_tokens == len(self.token_ids) > 0
        return time.monotonic() - started_s

    def _read(self) -> None:
        try:
            for response in self.call:
                if response.HasField("finished"):
                    self.finished = response.finished
                else:
                    delta = response.delta
                    self.token_ids.extend(delta.token_ids)
                    self.replies.setdefault(delta.index, []).extend(delta.token_ids)
                self.first.set()
        except grpc.RpcError as exc:
            self.error = exc
        finally:
            self.first.set()
