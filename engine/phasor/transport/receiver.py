"""The decode end: takes announced pages off links into staging, verifies them, and hands them to their owner.

Staging belongs to the transfer. A transfer that is given up can only ever write into memory that nobody reads:
the pool is written by the owner, after the checksum, and only while the ticket is open.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import torch

from phasor.core.config import TransportConfig
from phasor.core.errors import (
    LinkMismatchError,
    PhasorError,
    TransferError,
    TransferTimeoutError,
    WorkerLostError,
)
from phasor.core.identity import Identity
from phasor.core.ids import Incarnation, TicketId
from phasor.transport.connect import LinkEnds
from phasor.transport.incoming import IncomingLink
from phasor.transport.tickets import TicketBook
from phasor.v1 import worker_pb2 as pb
from phasor.v1 import worker_pb2_grpc
from phasor.wire.convert import identity_from_pb
from phasor.wire.status import errors_to_status

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """Verified pages. `acknowledge("")` says that they are placed, any other text why they are not wanted."""

    ticket_id: TicketId
    first_block: int
    pages: torch.Tensor | None
    """`[n, kv_heads, page_elements]` staging, the receiver of this event's until it acknowledges; None for no pages."""
    last: pb.LastChunk | None
    acknowledge: Callable[[str], None]
    """Any thread; the first call counts."""


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The rest of this ticket's pages will not arrive; the ticket is closed."""

    ticket_id: TicketId
    error: PhasorError


Deliver = Callable[[ChunkArrived | TransferFailed], None]


class PageReceiver(worker_pb2_grpc.PeerServicer):
    """Issues tickets and serves the Peer calls. Make it in the event loop's thread.

    Args:
        incarnation: this worker's.
        identity: what the other end must share.
        block_shape: `(kv_heads, page_elements)` of one block.
        dtype: of the pool.
        config: kind and timeout of links, and the address of this end.
        deliver: takes events, in any thread; must not block.
        ends: opens links; tests put other kinds in.
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        identity: Identity,
        block_shape: tuple[int, int],
        dtype: torch.dtype,
        config: TransportConfig,
        deliver: Deliver,
        ends: LinkEnds | None = None,
    ) -> None:
        self.config, self.deliver = config, deliver
        self.block_shape, self.dtype = block_shape, dtype
        self.ends = ends or LinkEnds(config)
        self.tickets = TicketBook()
        self.loop = asyncio.get_running_loop()
        self.bytes_received = 0
        self._incarnation, self._identity = incarnation, identity
        self._links: dict[str, IncomingLink] = {}
        self._deadlines: dict[TicketId, asyncio.TimerHandle] = {}

    @property
    def num_open_tickets(self) -> int:
        """Tickets that may still receive pages."""
        return len(self.tickets)

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that are not given back."""
        return sum(link.staging_bytes for link in list(self._links.values()))

    @property
    def num_links(self) -> int:
        """Links that are open or being opened."""
        return len(self._links)

    def issue(self, ticket_id: TicketId, *, first_block: int, num_blocks: int, deadline_s: float) -> None:
        """Open a ticket; any thread. If it is not filled in `deadline_s` seconds, it fails."""
        self.tickets.issue(ticket_id, first_block, num_blocks)

        def arm() -> None:
            if ticket_id in self.tickets:
                self._deadlines[ticket_id] = self.loop.call_later(deadline_s, self._expire, ticket_id, deadline_s)

        self.loop.call_soon_threadsafe(arm)

    def revoke(self, ticket_id: TicketId) -> None:
        """Close a ticket at its owner's wish; any thread, idempotent. Pages on their way are received and dropped."""
        self.tickets.revoke(ticket_id)
        self.loop.call_soon_threadsafe(self._disarm, ticket_id)

    def fail(self, ticket_id: TicketId, error: PhasorError) -> None:
        """Close a ticket and tell its owner, once; any thread."""
        if self.tickets.fail(ticket_id):
            self.loop.call_soon_threadsafe(self._disarm, ticket_id)
            self.deliver(TransferFailed(ticket_id, error))

    async def close(self) -> None:
        """End all links; tickets begun on them fail. Waits for link threads at most the links' timeout."""
        links = list(self._links.values())
        for link in links:
            link.end(TransferError("the decode worker is stopping"))
        await asyncio.gather(*(asyncio.to_thread(link.join, self.config.timeout_s + 1.0) for link in links))
        for handle in self._deadlines.values():
            handle.cancel()
        self._deadlines.clear()
        self._links.clear()

    async def OpenLink(self, request: pb.LinkOffer, context: Any) -> pb.LinkAccepted:
        """Check the offer and begin to join the link."""
        async with errors_to_status(context):
            self._check(request)
            link = IncomingLink(self, request, self._forget)
            self._links[request.link_id] = link
            link.start()
            return pb.LinkAccepted(decode_incarnation=self._incarnation)
        raise AssertionError("unreachable: errors_to_status aborts the call")

    async def Transfer(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.Acknowledgement]:
        """Read a link's announcements and answer them; the end of this call is the end of the link."""
        async with errors_to_status(context):
            first = await asyncio.wait_for(anext(request_iterator), self.config.timeout_s)
            link = self._links.get(first.link_id)
            if link is None or link.streaming:
                raise TransferError(f"link {first.link_id!r} is unknown here, or has a stream already")
            link.streaming = True
            reading = asyncio.create_task(_read(request_iterator, link))
            try:
                while (answer := await link.answers.get()) is not None:
                    yield answer
                if link.error is not None:
                    raise link.error
            finally:
                reading.cancel()
                link.end(TransferError("the prefill worker closed the link"))

    def _check(self, offer: pb.LinkOffer) -> None:
        if offer.decode_incarnation != self._incarnation:
            message = f"this decode worker is {self._incarnation}, not {offer.decode_incarnation}: it was restarted"
            raise WorkerLostError(message)
        difference = self._identity.first_difference(identity_from_pb(offer.identity))
        if difference is not None:
            raise LinkMismatchError(*difference)
        if offer.transport != self.config.kind:
            raise LinkMismatchError("transport", self.config.kind, offer.transport)
        if not offer.link_id or offer.link_id in self._links:
            raise TransferError(f"link id {offer.link_id!r} is empty or in use")

    def _forget(self, link: IncomingLink, error: PhasorError) -> None:
        """A link ended (called in its thread): its tickets fail; nothing else does."""
        self._links.pop(link.link_id, None)
        for ticket_id in self.tickets.begun_on(link.link_id):
            self.fail(ticket_id, error)

    def _expire(self, ticket_id: TicketId, deadline_s: float) -> None:
        self.fail(ticket_id, TransferTimeoutError(f"{ticket_id}: no complete transfer within {deadline_s:.1f} s"))

    def _disarm(self, ticket_id: TicketId) -> None:
        handle = self._deadlines.pop(ticket_id, None)
        if handle is not None:
            handle.cancel()


async def _read(announcements: AsyncIterator[pb.Announcement], link: IncomingLink) -> None:
    try:
        async for announcement in announcements:
            link.announce(announcement)
    finally:
        link.end(TransferError("the prefill worker closed the link"))
