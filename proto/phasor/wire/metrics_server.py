"""A process's metrics over HTTP, as Prometheus reads them: one registry, one port, one thread."""

import asyncio
import socket
import socketserver
import threading
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from phasor.core.config import MetricsPort
from phasor.core.errors import ConfigError

_END_S = 2.0
# How soon a stop is noticed. Half a second, which is what `start_http_server` takes, is long for a process's end.
_POLL_S = 0.05


class _Handler(WSGIRequestHandler):
    timeout = 5.0
    """Seconds that a connection may be silent."""

    def log_message(self, format: str, *args: object) -> None:
        """A scrape is no news."""


class _Server(ThreadingWSGIServer):
    def server_bind(self) -> None:
        # HTTPServer's own asks DNS for this host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """Answers GET /metrics in a thread of its own. Collectors are asked at that moment, in that thread.

    Args:
        registry: what to show.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._serving: tuple[_Server, threading.Thread] | None = None

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
            server_class = _Server6 if ":" in host else _Server
            server = make_server(host, port, make_wsgi_app(self._registry), server_class, _Handler)
        except OSError as exc:
            hint = f"cannot listen on {host}:{port} ({exc.strerror or exc}); choose another, 0 or off"
            raise ConfigError("metrics_port", port, hint) from exc
        thread = threading.Thread(
            target=server.serve_forever, args=(_POLL_S,), name="phasor-metrics", daemon=True
        )
        thread.start()
        self._serving = server, thread
        shown_host = f"[{host}]" if ":" in host else host
        return f"{shown_host}:{server.server_port}"

    async def stop(self) -> None:
        """Stop answering and give the port back. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is not None:
            await asyncio.to_thread(_stop, *serving)


def _stop(server: _Server, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join(_END_S)
