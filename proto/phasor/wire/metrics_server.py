"""A process's metrics over HTTP, as Prometheus reads them: one registry, one port, one thread."""

import asyncio
import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from phasor.core.config import MetricsPort
from phasor.core.errors import ConfigError

_END_S = 2.0


class MetricsServer:
    """Answers GET /metrics in a thread of its own. Collectors are asked at that moment, in that thread.

    Args:
        registry: what to show.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._serving: tuple[WSGIServer, threading.Thread] | None = None

    def start(self, host: str, port: MetricsPort) -> str:
        """Bind and serve.

        Args:
            host: address to bind.
            port: 0 takes a free one, "off" does nothing.

        Returns:
            "host:port"; empty when off.

        Raises:
            ConfigError: the port is in use, or the host is not one of this machine's.
        """
        assert self._serving is None, "started twice"
        if port == "off":
            return ""
        try:
            self._serving = start_http_server(port, host, self._registry)
        except OSError as exc:
            hint = f"cannot listen on {host}:{port} ({exc.strerror or exc}); choose another, 0 or off"
            raise ConfigError("metrics_port", port, hint) from exc
        shown_host = f"[{host}]" if ":" in host else host
        return f"{shown_host}:{self._serving[0].server_port}"

    async def stop(self) -> None:
        """Stop answering and give the port back. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is not None:
            await asyncio.to_thread(_stop, *serving)


def _stop(server: WSGIServer, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join(_END_S)
