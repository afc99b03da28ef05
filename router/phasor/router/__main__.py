"""`python -m phasor.router`: a router without Ray, over workers that are already running."""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from phasor.core.config import RouterConfig, build
from phasor.core.errors import ConfigError
from phasor.core.logs import configure_logging
from phasor.router.registry import Member
from phasor.router.server import RouterServer

DRAIN_S = 2.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line; argparse itself prints its usage before it."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 0, or 2 with one line for a wrong value."""
    parser = _parser()
    given = parser.parse_args(arguments)
    configure_logging(given.log_format, level=given.log_level.upper())
    try:
        names = (
            "host",
            "port",
            "local_prefill_tokens",
            "default_timeout_s",
            "dispatch_timeout_s",
            "max_in_flight",
            "metrics_port",
            "log_format",
        )
        values = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
        config = build(RouterConfig, values)
        members = [_member("prefill", text) for text in given.prefill]
        members += [_member("decode", text) for text in given.decode]
        if not given.decode:
            raise ConfigError("--decode", "", "give the host:port of at least one decode worker")
        asyncio.run(_serve(config, members))
    except ConfigError as exc:
        sys.stderr.write(f"{parser.prog}: {exc}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    defaults = RouterConfig()
    parser = _Parser(prog="python -m phasor.router", description=__doc__)
    add = parser.add_argument
    add("--prefill", action="append", default=[], metavar="HOST:PORT", help="a prefill worker; repeatable")
    add("--decode", action="append", default=[], metavar="HOST:PORT", help="a decode worker; repeatable")
    add("--host", help=f"address to bind (default {defaults.host})")
    add("--port", type=int, help=f"port to bind, 0 takes a free one (default {defaults.port})")
    add(
        "--local-prefill-tokens",
        type=int,
        metavar="N",
        help="prompts up to N tokens are read by decode workers",
    )
    add(
        "--default-timeout-s",
        type=float,
        help=f"deadline of requests without one ({defaults.default_timeout_s:g})",
    )
    add("--dispatch-timeout-s", type=float, help="how long an idle decode worker may take to admit")
    add("--max-in-flight", type=int, help=f"requests at most; more are refused ({defaults.max_in_flight})")
    add(
        "--metrics-port",
        metavar="PORT",
        help="port of /metrics for Prometheus; 0 takes a free one (default), off serves none",
    )
    add("--log-format", choices=["text", "json"], default="text")
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    return parser


def _member(role: str, text: str) -> Member:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) <= 65535):
        raise ConfigError(f"--{role}", text, "must be host:port, such as 127.0.0.1:50061")
    return Member("prefill" if role == "prefill" else "decode", text)


async def _serve(config: RouterConfig, members: Sequence[Member]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = RouterServer(config)
    server.set_members(members)
    address = await server.start()
    sys.stdout.write(json.dumps({"address": address, "metrics_address": server.metrics_address}) + "\n")
    sys.stdout.flush()
    await stop.wait()
    await server.stop(DRAIN_S)


if __name__ == "__main__":
    sys.exit(main())
