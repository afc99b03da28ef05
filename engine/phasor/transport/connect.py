"""How the two ends of a link find each other."""

from collections.abc import Callable
from dataclasses import dataclass

from phasor.core.config import TransportConfig
from phasor.transport.link import Link
from phasor.transport.process_group import DECODE_RANK, PREFILL_RANK, host_store, join_store, open_link


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A place where the decode end is awaited."""

    host: str
    port: int
    connect: Callable[[], Link]
    """Blocks until the decode end has joined, at most for the link's timeout."""


class LinkEnds:
    """Opens either end of a link of the configured kind. Everything here blocks: call it in a thread."""

    def __init__(self, config: TransportConfig) -> None:
        self._config = config

    def host(self, link_id: str) -> Rendezvous:
        """Prepare the prefill end."""
        config = self._config
        store = host_store(config.host, config.timeout_s)

        def connect() -> Link:
            return open_link(config.kind, store, link_id, PREFILL_RANK, config.timeout_s, config.host)

        return Rendezvous(config.host, store.port, connect)

    def join(self, link_id: str, host: str, port: int) -> Link:
        """Open the decode end."""
        config = self._config
        store = join_store(host, port, config.timeout_s)
        return open_link(config.kind, store, link_id, DECODE_RANK, config.timeout_s, config.host)
