"""The router's process: the Inference service, health and reflection, over a registry of workers.

What clients ask is answered in `edge`; the life of one request is in `lifecycle` and `execution`. Imports
neither torch nor Ray: a test holds that.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from phasor.core.clock import Clock, MonotonicClock
from phasor.core.config import RouterConfig
from phasor.core.errors import ConfigError
from phasor.router.edge import InferenceEdge
from phasor.router.registry import Member, Registry, RegistryTimings, check_members
from phasor.router.served import ServedModel
from phasor.v1 import inference_pb2, inference_pb2_grpc
from phasor.wire import channels
from phasor.wire.metrics_server import MetricsServer

_log = logging.getLogger(__name__)

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class RouterServer:
    """A router in this process. Start it, tell it its members, stop it.

    Args:
        config: address and limits.
        timings: how workers' health is watched.
        clock: where all times come from.
        validate: check every life cycle's invariants after every event (tests).
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        timings: RegistryTimings | None = None,
        clock: Clock | None = None,
        validate: bool = False,
    ) -> None:
        self._config, self._timings = config, timings
        self._clock = clock or MonotonicClock()
        self._validate = validate
        self._running: _Running | None = None
        self._members: tuple[Member, ...] = ()

    async def start(self) -> str:
        """Bind and serve.

        Returns:
            The address, host:port.

        Raises:
            ConfigError: the port is in use, or the host is not one of this machine's.
        """
        assert self._running is None, "started twice"
        host, port = self._config.host, self._config.port
        _check_bindable(host, port)
        registry = Registry(self._timings)
        served = ServedModel(registry)
        edge = InferenceEdge(self._config, registry, served, self._clock, validate=self._validate)
        health = grpc_health.aio.HealthServicer()
        server = channels.new_server()
        inference_pb2_grpc.add_InferenceServicer_to_server(edge, server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        names = (_SERVICE, grpc_health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        metrics = MetricsServer(edge.metrics.registry)
        edge.metrics_address = metrics.start(host, self._config.metrics_port)
        running = _Running(registry, served, edge, health, server, metrics)
        await running.publish_health()
        shown_host = f"[{host}]" if ":" in host else host
        try:
            bound = server.add_insecure_port(f"{shown_host}:{port}")
        except RuntimeError as exc:
            await server.stop(None)
            await metrics.stop()
            raise ConfigError("router.port", port, "in use; choose another with --port") from exc
        await server.start()
        self._running = running
        registry.set_members(self._members)
        running.follower = asyncio.create_task(running.follow_registry(), name="follow registry")
        return f"{shown_host}:{bound}"

    def set_members(self, members: Sequence[Member]) -> None:
        """Replace the workers to use. Requests in flight on a removed one go on to their end.

        Call it on the server's event loop; before `start` it is remembered.

        Raises:
            ConfigError: one address is given for both roles.
        """
        check_members(members)
        self._members = tuple(members)
        if self._running is not None:
            self._running.registry.set_members(self._members)

    async def stop(self, grace_s: float = 2.0) -> None:
        """Refuse new requests, let those in flight end for `grace_s`, then cancel the rest. Idempotent."""
        running, self._running = self._running, None
        if running is None:
            return
        if running.follower is not None:
            running.follower.cancel()
            await asyncio.gather(running.follower, return_exceptions=True)
        await running.health.enter_graceful_shutdown()
        await running.server.stop(grace_s)
        await running.registry.close()
        running.served.close()
        await running.metrics.stop()

    @property
    def metrics_address(self) -> str:
        """Where Prometheus reads this router, host:port; empty when off or not running."""
        return self._running.edge.metrics_address if self._running else ""

    @property
    def registry(self) -> Registry:
        """The workers; only while running."""
        assert self._running is not None, "not started"
        return self._running.registry

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended. 0 when idle."""
        return self._running.edge.num_in_flight if self._running else 0


def _check_bindable(host: str, port: int) -> None:
    """Find out what is wrong with an address before gRPC does, which logs more and says less."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC binds: a port whose last connections are only waiting to be forgotten is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except PermissionError as exc:
        raise ConfigError("router.port", port, "needs privileges; choose one above 1023 with --port") from exc
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError("router.port", port, "in use; choose another with --port") from exc
        raise ConfigError(
            "router.host", host, f"cannot be bound ({exc}); use an address of this machine"
        ) from exc


class _Running:
    """The parts of a started server."""

    def __init__(
        self,
        registry: Registry,
        served: ServedModel,
        edge: InferenceEdge,
        health: "grpc_health.aio.HealthServicer",
        server: grpc.aio.Server,
        metrics: MetricsServer,
    ) -> None:
        self.registry, self.served, self.edge = registry, served, edge
        self.health, self.server, self.metrics = health, server, metrics
        self.follower: asyncio.Task[None] | None = None
        self._was_ready: bool | None = None

    async def follow_registry(self) -> None:
        """Load the model's tokenizer and publish health whenever a worker comes, goes or changes."""
        while True:
            await self.registry.changed.wait()
            self.registry.changed.clear()
            try:
                await self.served.refresh()
                await self.publish_health()
            except Exception:
                # The loop's top: health must go on being published.
                _log.exception("following the workers")

    async def publish_health(self) -> None:
        """Say SERVING when a decode worker is ready and the tokenizer is loaded, else NOT_SERVING."""
        is_ready = self.served.is_ready
        if is_ready == self._was_ready:
            return
        # That a router begins without workers is no news.
        level = logging.DEBUG if self._was_ready is None and not is_ready else logging.INFO
        self._was_ready = is_ready
        value = (
            health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", _SERVICE):
            await self.health.set(service, value)
        _log.log(level, "health: %s", "SERVING" if is_ready else "NOT_SERVING")
