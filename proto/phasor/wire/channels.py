"""How every gRPC channel and server of Phasor is set up: keepalive that notices a silent peer in 2.5 seconds.

Measured (facts/ray.md section 4): with these values a call fails 1.9 s after the link went down; with gRPC's
defaults it waits for its own deadline.
"""

from typing import Any

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 64 * 2**20

PING_TIMEOUT_MS = 1500
"""How long a ping may stay unanswered. gRPC reads two options: `keepalive_timeout_ms` bounds a connection on which
nothing is acknowledged (a pulled cable), `http2.ping_timeout_ms` (a minute by default) one whose kernel acknowledges
bytes that a stopped process never reads. Measured with grpcio 1.85.3 on a SIGSTOPped server: 28.9 s (the call's own
deadline) without the second, 1.0 s with it at 1000."""

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    # Pings that bunch up (a client that does not read, a loaded machine) must not end every call on a connection.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two processes never share a port by accident: a port in use is an error at start.
    ("grpc.so_reuseport", 0),
]


def connect(address: str) -> grpc.aio.Channel:
    """Open an asyncio channel to `host:port`. The caller closes it."""
    # Each channel has its own connection: a stuck one does not hold up another's.
    return grpc.aio.insecure_channel(
        address, options=[*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    )


def connect_sync(address: str) -> grpc.Channel:
    """Open a blocking channel to `host:port`. The caller closes it."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


def new_server() -> grpc.aio.Server:
    """Make an asyncio server with our keepalive and message limits."""
    return grpc.aio.server(options=SERVER_OPTIONS)
