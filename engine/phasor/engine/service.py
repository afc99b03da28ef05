"""What both workers' gRPC services share: starting, describing, counting, health, stopping.

A plain asyncio service: it runs the same in a process of its own (`python -m phasor.prefill_worker`), in a Ray
actor and in a test.
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from phasor.core.config import WorkerConfig
from phasor.core.errors import ConfigError, InvalidRequestError, PhasorError, WorkerLostError
from phasor.core.ids import RequestId, new_incarnation
from phasor.core.logs import error_fields, log_event
from phasor.engine.host import EngineHost, load_engine
from phasor.engine.worker_metrics import WorkerMetrics
from phasor.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from phasor.wire.channels import new_server
from phasor.wire.convert import identity_to_pb
from phasor.wire.metrics_server import MetricsServer

_STOP_ENGINE_S = 5.0

_log = logging.getLogger(__name__)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Base of the two workers. Subclasses add the engine loop and their own calls.

    Args:
        config: this worker's configuration.
    """

    role: ClassVar[Any]

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.incarnation = new_incarnation()
        self.address = ""
        self._ready = False
        self._server: grpc.aio.Server = new_server()
        self._health = health.aio.HealthServicer()
        self._host: EngineHost | None = None
        self._num_claimed = 0
        self._engine_started = False
        self.num_leaked_blocks = 0
        role = "prefill" if self.role == inference_pb2.WORKER_ROLE_PREFILL else "decode"
        self.metrics = WorkerMetrics(role, self.counts)
        self.metrics_address = ""
        """Where Prometheus reads this worker, host:port; empty when off or not started."""
        self._metrics_server = MetricsServer(self.metrics.registry)

    @property
    def host(self) -> EngineHost:
        """The loaded engine; only after `start` began serving."""
        assert self._host is not None, "the worker is not started"
        return self._host

    async def start(self) -> str:
        """Bind the port, load the model, prove that it generates, serve.

        Returns:
            "host:port", ready for requests.

        Raises:
            ConfigError: the port is in use, or the model, its limits or the memory do not work out.
        """
        self.address = bind(self._server, self.config.host, self.config.port)
        self._host = await asyncio.to_thread(load_engine, self.config)
        self._asyncio_loop = asyncio.get_running_loop()
        self.start_engine()
        self._engine_started = True
        self.metrics_address = self._metrics_server.start(self.config.host, self.config.metrics_port)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._ready = True
        _log.info(
            "%s %s serves %s at %s", type(self).__name__, self.incarnation, self.host.folder, self.address
        )
        return self.address

    async def stop(self, grace_s: float = 2.0) -> None:
        """Stop accepting, cancel what has not ended after `grace_s`, end all threads. Idempotent."""
        self._ready = False
        await self._server.stop(grace_s)
        await self._metrics_server.stop()
        if self._engine_started:
            self._engine_started = False
            await self.stop_engine()

    def mark_unhealthy(self) -> None:
        """Report NOT_SERVING from now on; callable from any thread."""
        self._ready = False
        status = health_pb2.HealthCheckResponse.NOT_SERVING
        self._asyncio_loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._health.set("", status)))

    def start_engine(self) -> None:
        """Build and start the engine loop; called once, in the event loop's thread."""
        raise NotImplementedError

    async def stop_engine(self) -> None:
        """Stop the engine loop and the transport."""
        raise NotImplementedError

    def counts(self) -> inference_pb2.WorkerCounts:
        """Return what this worker holds now."""
        raise NotImplementedError

    def description(self) -> worker_pb2.WorkerDescription:
        """Return who this worker is and what it can take."""
        rope = self.host.model.rope
        return worker_pb2.WorkerDescription(
            role=self.role,
            incarnation=self.incarnation,
            ready=self._ready,
            identity=identity_to_pb(self.host.identity),
            rope=inference_pb2.RopeSummary(
                scheme=rope.scheme,
                theta=rope.theta,
                rotary_dim=rope.rotary_dim,
                trained_positions=rope.trained_positions,
                max_positions=rope.max_positions,
                fingerprint=rope.fingerprint(),
            ),
            max_model_len=self.host.max_model_len,
            num_blocks=self.host.pool.num_blocks,
            block_bytes=self.host.layout.block_bytes,
            served_name=self.host.served_name,
            model_folder=str(self.host.folder),
            dtype=self.config.model.dtype,
            max_running=self.config.scheduler.max_running,
            pid=os.getpid(),
            metrics_address=self.metrics_address,
        )

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Any
    ) -> worker_pb2.WorkerDescription:
        """Answer who this is."""
        return self.description()

    async def GetCounts(
        self, request: worker_pb2.GetCountsRequest, context: Any
    ) -> inference_pb2.WorkerCounts:
        """Answer what is held now."""
        return self.counts()

    def claim(self, request_id: str, incarnation: str) -> RequestId:
        """Return the id under which a call is known inside this worker; no other call ever has it.

        A client may use its own id again as soon as it has left. The engine still works for the call before then,
        and a token of that must not find its way into the new one.

        Raises:
            WorkerLostError: the router means a worker that this one has replaced.
        """
        if incarnation and incarnation != self.incarnation:
            raise WorkerLostError(
                f"this worker is {self.incarnation}, not {incarnation}: it was restarted; ask again"
            )
        self._num_claimed += 1
        return RequestId(f"{request_id}#{self._num_claimed}")

    @contextmanager
    def log_failure(self, request_id: str) -> Iterator[None]:
        """Log a call that ends in an error or is cancelled, under the id that the router knows it by."""
        start_s = time.monotonic()
        try:
            yield
        except PhasorError as exc:
            fields: dict[str, str | float] = {**error_fields(exc), "total_s": time.monotonic() - start_s}
            log_event(_log, "failed", request_id=request_id, level=logging.WARNING, **fields)
            raise
        except asyncio.CancelledError:
            total_s = time.monotonic() - start_s
            log_event(_log, "failed", request_id=request_id, code="CANCELLED", total_s=total_s)
            raise

    def check_tokens(self, token_ids: Any) -> tuple[int, ...]:
        """Return the prompt as a tuple, checked against vocabulary and length: peers are not trusted either.

        Raises:
            InvalidRequestError: empty, too long, or an id outside the vocabulary.
        """
        tokens = tuple(token_ids)
        if not tokens:
            raise InvalidRequestError("token_ids", [], "is empty; give at least one token")
        if len(tokens) > self.host.max_model_len:
            hint = f"longer than this worker's limit of {self.host.max_model_len} tokens; shorten the prompt"
            raise InvalidRequestError("token_ids", f"{len(tokens)} tokens", hint)
        vocab_size = self.host.model.vocab_size
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError("token_ids", token, f"is outside the vocabulary of {vocab_size}")
        return tokens

    def check_leaks(self) -> None:
        """Count blocks held while nothing runs; called by the engine thread when it is idle."""
        self.host.pool.check()
        leaked = self.host.pool.num_used
        if leaked and leaked != self.num_leaked_blocks:
            _log.error("%d blocks are held although no request runs: a bug", leaked)
        self.num_leaked_blocks = leaked


def bind(server: grpc.aio.Server, host: str, port: int) -> str:
    """Bind `server` and return "host:port".

    Raises:
        ConfigError: the port is in use or the host is not ours.
    """
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as exc:
        raise ConfigError(
            "port", port, f"cannot listen on {host}:{port}; is it in use? choose another, or 0"
        ) from exc
    if bound == 0:
        raise ConfigError("port", port, f"cannot listen on {host}:{port}; is it in use? choose another, or 0")
    return f"{host}:{bound}"
