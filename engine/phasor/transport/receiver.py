"""The decode end: takes announced pages off links into staging, verifies them, and hands them to their owner.

Staging belongs to the transfer. A transfer that is given up can only ever write into memory that nobody reads:
the pool is written by the owner, after the checksum, and only while the ticket is open. What is decided here is
decided by `tickets.TicketBook`; this module gives it events and carries out its instructions.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc.aio
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
from phasor.transport.connect import link_factory_for
from phasor.transport.events import ChunkArrived, TransferEvent, TransferFailed
from phasor.transport.incoming import IncomingLink
from phasor.transport.link import LinkFactory
from phasor.transport.loops import post
from phasor.transport.tickets import (
    Answer,
    CloseTicket,
    EndLink,
    Event,
    Expired,
    Instruction,
    Issued,
    LinkClosed,
    LinkEnded,
    LinkOpened,
    Revoked,
    TicketBook,
)
from phasor.v1 import worker_pb2 as pb
from phasor.v1 import worker_pb2_grpc
from phasor.wire.convert import identity_from_pb
from phasor.wire.status import errors_to_status

__all__ = ["MAX_STAGING_BYTES", "ChunkArrived", "PageReceiver", "TransferEvent", "TransferFailed"]

MAX_STAGING_BYTES = 256 * 2**20
"""Staged but not yet placed bytes per link; a sender keeps to half of it."""

_log = logging.getLogger(__name__)


class PageReceiver(worker_pb2_grpc.PeerServicer):
    """Issues tickets and serves the Peer calls. Make it in the event loop's thread.

    Args:
        incarnation: this worker's.
        identity: what the other end must share.
        block_shape: `(kv_heads, page_elements)` of one block.
        dtype: of the pool.
        config: kind and timeout of links, and the address of this end.
        deliver: takes events, in any thread; must not block.
        link_factory: opens links; of the configured kind by default.
        max_staging_bytes: staged but not yet placed, per link.
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        identity: Identity,
        block_shape: tuple[int, int],
        dtype: torch.dtype,
        config: TransportConfig,
        deliver: Callable[[TransferEvent], None],
        link_factory: LinkFactory | None = None,
        max_staging_bytes: int = MAX_STAGING_BYTES,
    ) -> None:
        self.deliver = deliver
        self.block_shape, self.dtype = block_shape, dtype
        self._config = config
        self._factory = link_factory or link_factory_for(config)
        self._incarnation, self._identity = incarnation, identity
        self._max_staging_bytes = max_staging_bytes
        self._loop = asyncio.get_running_loop()
        # Guards the book, the links and the count; notified when any of them changed. Never held while
        # somebody else's code runs.
        self._changed = threading.Condition()
        self._book = TicketBook(max_chunk_bytes=max_staging_bytes)
        self._links: dict[str, IncomingLink] = {}
        self._bytes_received = 0
        self._deadlines: dict[TicketId, asyncio.TimerHandle] = {}
        self._closing = False

    @property
    def num_open_tickets(self) -> int:
        """Tickets that may still receive pages, or whose pages are not placed yet."""
        with self._changed:
            return self._book.num_open_tickets

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that are not given back."""
        with self._changed:
            return self._book.staging_bytes()

    @property
    def bytes_received(self) -> int:
        """Bytes of pages that arrived intact since the start."""
        return self._bytes_received

    @property
    def num_links(self) -> int:
        """Links whose thread has not ended."""
        with self._changed:
            return len(self._links)

    def issue(self, ticket_id: TicketId, *, first_block: int, num_blocks: int, deadline_s: float) -> None:
        """Open a ticket; any thread. If its pages are not placed in `deadline_s` seconds, it fails."""
        self.apply(Issued(ticket_id, first_block, num_blocks))
        post(self._loop, self._arm, ticket_id, deadline_s)

    def revoke(self, ticket_id: TicketId) -> None:
        """Close a ticket at its owner's wish; any thread, idempotent. Pages on their way are received and dropped."""
        self.apply(Revoked(ticket_id))

    async def close(self) -> None:
        """End all links and fail all open tickets. Waits for link threads at most the links' timeout and a bit."""
        self._closing = True
        error = TransferError("the decode worker is stopping")
        with self._changed:
            links = list(self._links.values())
        for link in links:
            self._end(link, error)
        with self._changed:
            open_tickets = self._book.open_tickets
        for ticket_id in open_tickets:
            self.revoke(ticket_id)
            self.deliver(TransferFailed(ticket_id, error))
        # A thread that is joining a link waits for two things, one timeout each.
        longest_s = 2 * self._config.timeout_s + 1.0
        await asyncio.gather(*(asyncio.to_thread(link.join, longest_s) for link in links))
        for handle in self._deadlines.values():
            handle.cancel()
        self._deadlines.clear()

    async def OpenLink(self, request: pb.LinkOffer, context: Any) -> pb.LinkAccepted:
        """Check the offer and begin to join the link."""
        async with errors_to_status(context):
            try:
                self._check(request)
            except PhasorError as exc:
                _log.warning("refused a link from %s: %s", request.prefill_incarnation, exc)
                raise
            link = IncomingLink(request.link_id, request.prefill_incarnation, self)
            with self._changed:
                self._links[link.link_id] = link
            self.apply(LinkOpened(link.link_id, Incarnation(request.prefill_incarnation)))
            link.start(lambda: self._factory.join(request.link_id, request.store_host, request.store_port))
            # Joining takes one timeout at most; a sender that then brings no stream has died.
            self._loop.call_later(2 * self._config.timeout_s, self._expect_stream, link)
            return pb.LinkAccepted(decode_incarnation=self._incarnation)
        raise AssertionError("unreachable: errors_to_status aborts the call")

    async def Transfer(self, request_iterator: Any, context: Any) -> None:
        """Read a link's announcements and answer them; the end of this call is the end of the link."""
        async with errors_to_status(context):
            link = await self._named_link(context)
            reading = asyncio.create_task(self._read(context, link), name=f"announcements {link.link_id}")
            try:
                while (answer := await link.answers.get()) is not None:
                    await context.write(answer)
                if link.error is not None:
                    raise link.error
            finally:
                reading.cancel()
                self._end(link, TransferError("the prefill worker's stream ended"))

    def apply(self, event: Event) -> list[Instruction]:
        """Have the book handle an event and carry out what it says; any thread. For link threads."""
        with self._changed:
            instructions = self._book.handle(event)
            if isinstance(event, LinkClosed):
                del self._links[event.link_id]
            links = dict(self._links)
            self._changed.notify_all()
        for instruction in instructions:
            if isinstance(instruction, Answer):
                answer = pb.Acknowledgement(
                    ticket_id=instruction.ticket_id, sequence=instruction.sequence, error=instruction.error
                )
                post(self._loop, links[instruction.link_id].answers.put_nowait, answer)
            elif isinstance(instruction, CloseTicket):
                post(self._loop, self._disarm, instruction.ticket_id)
                if instruction.error is not None:
                    self.deliver(TransferFailed(instruction.ticket_id, instruction.error))
            elif isinstance(instruction, EndLink):
                link = links[instruction.link_id]
                _log.info("%s from %s ended: %s", link.link_id, link.prefill_incarnation, instruction.error)
                link.stop(instruction.error)
                post(self._loop, link.answers.put_nowait, None)
        return instructions

    def wait_for_room(self, link_id: str, num_bytes: int) -> None:
        """Block until so much more may be staged on the link, or it has ended; for link threads.

        Raises:
            TransferError: no room within the links' timeout.
        """

        def has_room() -> bool:
            staged = self._book.staging_bytes(link_id)
            return staged == 0 or staged + num_bytes <= self._max_staging_bytes

        with self._changed:
            if not self._changed.wait_for(
                lambda: has_room() or not self._book.is_live(link_id), self._config.timeout_s
            ):
                staged = self._book.staging_bytes(link_id)
                raise TransferError(
                    f"{staged} staged bytes were not placed in {self._config.timeout_s:.1f} s, "
                    f"{num_bytes} more were announced; at most {self._max_staging_bytes}"
                )

    def count_received(self, num_bytes: int) -> None:
        """Note bytes that arrived intact; for link threads."""
        with self._changed:
            self._bytes_received += num_bytes

    def _check(self, offer: pb.LinkOffer) -> None:
        if self._closing:
            raise WorkerLostError("this decode worker is stopping")
        if offer.decode_incarnation != self._incarnation:
            raise WorkerLostError(
                f"this decode worker is {self._incarnation}, not {offer.decode_incarnation}: it was restarted"
            )
        difference = self._identity.first_difference(identity_from_pb(offer.identity))
        if difference is not None:
            raise LinkMismatchError(*difference)
        if offer.transport != self._factory.kind:
            raise LinkMismatchError("transport", self._factory.kind, offer.transport)
        if not offer.prefill_incarnation:
            raise TransferError("the offer of a link names no prefill incarnation")
        with self._changed:
            if not offer.link_id or offer.link_id in self._links:
                raise TransferError(f"link id {offer.link_id!r} is empty or in use")

    async def _named_link(self, context: Any) -> IncomingLink:
        """Read a stream's first message, which names its link."""
        try:
            first = await asyncio.wait_for(context.read(), self._config.timeout_s)
        except TimeoutError as exc:
            raise TransferTimeoutError("no link was named on the stream") from exc
        link_id = first.link_id if first is not grpc.aio.EOF else ""
        with self._changed:
            link = self._links.get(link_id)
        if link is None or link.streaming or link.error is not None:
            raise TransferError(f"link {link_id!r} is unknown here, has ended, or has a stream already")
        link.streaming = True
        return link

    async def _read(self, context: Any, link: IncomingLink) -> None:
        try:
            while (announcement := await context.read()) is not grpc.aio.EOF:
                link.announce(announcement)
        except Exception as exc:  # the top of this task: however the stream broke, the link is over
            _log.info("the stream of %s broke: %r", link.link_id, exc)
        finally:
            self._end(link, TransferError("the prefill worker closed the link"))

    def _expect_stream(self, link: IncomingLink) -> None:
        if not link.streaming:
            self._end(link, TransferTimeoutError(f"{link.link_id}: no stream of announcements came"))

    def _end(self, link: IncomingLink, error: PhasorError) -> None:
        self.apply(LinkEnded(link.link_id, error))

    def _arm(self, ticket_id: TicketId, deadline_s: float) -> None:
        with self._changed:
            is_open = self._book.is_open(ticket_id)
        if is_open:
            self._deadlines[ticket_id] = self._loop.call_later(
                deadline_s, self.apply, Expired(ticket_id, deadline_s)
            )

    def _disarm(self, ticket_id: TicketId) -> None:
        handle = self._deadlines.pop(ticket_id, None)
        if handle is not None:
            handle.cancel()
