"""The page over HTTP: where it listens, what it answers, and that it gives its port back."""

import asyncio
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from phasor.core.errors import ConfigError
from phasor.wire.metrics_server import MetricsServer


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("phasor_things", "Things.", registry=made).inc(3)
    return made


def read(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


async def test_a_free_port_serves_the_registry_until_stopped() -> None:
    server = MetricsServer(registry())
    address = server.start("127.0.0.1", 0)
    kind, page = await asyncio.to_thread(read, f"http://{address}/metrics")
    assert kind.startswith("text/plain") and "phasor_things_total 3.0" in page
    await server.stop()
    await server.stop()
    again = MetricsServer(registry())
    assert again.start("127.0.0.1", int(address.rpartition(":")[2])) == address
    await again.stop()


async def test_off_serves_nothing() -> None:
    server = MetricsServer(registry())
    assert server.start("127.0.0.1", "off") == ""
    await server.stop()


async def test_a_port_in_use_is_a_configuration_error() -> None:
    first = MetricsServer(registry())
    port = int(first.start("127.0.0.1", 0).rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"metrics_port={port}: cannot listen on 127.0.0.1:{port} .*or off"):
        MetricsServer(registry()).start("127.0.0.1", port)
    await first.stop()
