"""The prefill end: pushes pages to decode workers, in order, and collects their acknowledgements.

    push (any thread) -> the link's queue -> link thread: checksum, announcement onto the gRPC stream, bytes onto
    the link -> acknowledgement -> the transfer is done when the last chunk's came

One link, one thread and one stream per decode worker incarnation; whatever breaks one of them ends all of its
transfers, and the next `open` builds a new link.
"""

import asyncio
import logging
import queue
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import torch

from phasor.core.config import TransportConfig
from phasor.core.errors import PhasorError, TransferError, TransferTimeoutError
from phasor.core.identity import Identity
from phasor.core.ids import Incarnation
from phasor.transport.checksum import checksum
from phasor.transport.connect import LinkEnds
from phasor.transport.link import Link
from phasor.v1 import worker_pb2 as pb
from phasor.v1 import worker_pb2_grpc
from phasor.wire.channels import connect
from phasor.wire.convert import identity_to_pb
from phasor.wire.status import error_from_status

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageChunk:
    """Consecutive blocks of one request."""

    first_block: int
    """Index in the request's block list."""
    pages: Sequence[torch.Tensor]
    """Contiguous `[n, kv_heads, page_elements]` pool slices; may be empty. They stay the caller's."""
    last: pb.LastChunk | None = None
    """Set on the last chunk."""


class OutgoingTransfer:
    """One ticket's pages on their way. Made by `PageSender.open`."""

    def __init__(self, ticket: pb.Ticket, link: "_OutgoingLink") -> None:
        self.ticket_id = ticket.ticket_id
        self.num_bytes = 0
        """Bytes of pages put on the link so far."""
        self._link = link
        self._unacknowledged: set[int] = set()
        self._last_announced = False
        self._outcome: asyncio.Future[None] = link.loop.create_future()
        # A transfer may be dropped without anybody asking how it ended.
        self._outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.ended = threading.Event()
        """Set once nothing more is to be sent for this ticket."""

    def push(self, chunk: PageChunk) -> None:
        """Queue a chunk; any thread, never blocks. After the transfer ended it is ignored.

        The blocks must stay held until `wait_acknowledged` returns or raises, or `abort` was called; a later
        overwrite can only spoil the checksum of a void ticket.
        """
        self._link.enqueue(self, chunk)

    async def wait_acknowledged(self, timeout_s: float) -> None:
        """Wait until the last chunk was pushed and every chunk acknowledged.

        Raises:
            TransferTimeoutError: not within `timeout_s`.
            TransferError: the decode worker refused a chunk, or the link broke.
        """
        try:
            await asyncio.wait_for(asyncio.shield(self._outcome), timeout_s)
        except TimeoutError as exc:
            raise TransferTimeoutError(f"{self.ticket_id}: not acknowledged within {timeout_s:.1f} s") from exc

    def abort(self, reason: str) -> None:
        """Give the ticket up; any thread, idempotent. The other end is told in order with what was pushed."""
        if not self.ended.is_set():
            self.ended.set()
            self._link.enqueue_abort(self, reason)

    def announced(self, sequence: int, last: bool, num_bytes: int) -> None:
        """Note a chunk that goes out now; event loop only."""
        self._unacknowledged.add(sequence)
        self._last_announced |= last
        self.num_bytes += num_bytes

    def acknowledged(self, sequence: int, error: str) -> None:
        """Note an answer; event loop only. Late and double ones are ignored."""
        self._unacknowledged.discard(sequence)
        if error:
            self.fail(TransferError(f"{self.ticket_id}: the decode worker refused pages: {error}"))
        elif self._last_announced and not self._unacknowledged and not self._outcome.done():
            self.ended.set()
            self._outcome.set_result(None)

    def fail(self, error: PhasorError) -> None:
        """End the transfer with `error`; event loop only, idempotent."""
        self.ended.set()
        if not self._outcome.done():
            self._outcome.set_exception(error)

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._outcome.done()


class _OutgoingLink:
    """Stream, thread and process group to one decode worker incarnation."""

    def __init__(self, link_id: str, link: Link, channel: grpc.aio.Channel, peer: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.dead: PhasorError | None = None
        self._link_id, self._link, self._channel, self._peer = link_id, link, channel, peer
        self._transfers: dict[str, OutgoingTransfer] = {}
        self._work: queue.SimpleQueue[tuple[OutgoingTransfer, PageChunk | str] | None] = queue.SimpleQueue()
        self._announcements: asyncio.Queue[pb.Announcement | None] = asyncio.Queue()
        self._sequence = 0
        self._stream = worker_pb2_grpc.PeerStub(channel).Transfer(self._outgoing())
        self._reader = asyncio.create_task(self._read_acknowledgements(), name=f"acks {link_id}")
        self._thread = threading.Thread(target=self._run, name=f"phasor-{link_id}", daemon=True)
        self._thread.start()

    def begin(self, ticket: pb.Ticket) -> OutgoingTransfer:
        """Start a transfer on this link."""
        transfer = OutgoingTransfer(ticket, self)
        self._transfers = {k: t for k, t in self._transfers.items() if not t.done}
        self._transfers[ticket.ticket_id] = transfer
        return transfer

    def enqueue(self, transfer: OutgoingTransfer, chunk: PageChunk) -> None:
        self._work.put((transfer, chunk))

    def enqueue_abort(self, transfer: OutgoingTransfer, reason: str) -> None:
        self._work.put((transfer, reason))

    def fail(self, error: PhasorError) -> None:
        """End the link and all its transfers; event loop only, idempotent."""
        if self.dead is not None:
            return
        self.dead = error
        for transfer in self._transfers.values():
            transfer.fail(error)
        self._transfers.clear()
        self._work.put(None)
        self._announcements.put_nowait(None)
        self._stream.cancel()
        self._link.close()

    async def close(self, timeout_s: float) -> None:
        """End the link and wait for what it started."""
        self.fail(TransferError("the prefill worker is stopping"))
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()
        await asyncio.to_thread(self._thread.join, timeout_s)

    async def _outgoing(self) -> AsyncIterator[pb.Announcement]:
        yield pb.Announcement(link_id=self._link_id)
        while (announcement := await self._announcements.get()) is not None:
            yield announcement

    async def _read_acknowledgements(self) -> None:
        try:
            async for acknowledgement in self._stream:
                transfer = self._transfers.get(acknowledgement.ticket_id)
                if transfer is not None:
                    transfer.acknowledged(acknowledgement.sequence, acknowledgement.error)
            self.fail(TransferError(f"{self._peer} closed the link"))
        except grpc.aio.AioRpcError as exc:
            self.fail(error_from_status(exc, peer=self._peer))

    def _run(self) -> None:
        """The link thread: one chunk after the other, so that bytes follow their announcements' order."""
        try:
            while (item := self._work.get()) is not None:
                transfer, chunk = item
                if isinstance(chunk, str):
                    self._announce(transfer, pb.Announcement(ticket_id=transfer.ticket_id, abort_reason=chunk), 0)
                elif not transfer.ended.is_set():
                    self._send(transfer, chunk)
        except TransferError as exc:
            self.loop.call_soon_threadsafe(self.fail, exc)

    def _send(self, transfer: OutgoingTransfer, chunk: PageChunk) -> None:
        announcement = pb.Announcement(
            ticket_id=transfer.ticket_id,
            first_block=chunk.first_block,
            num_blocks=sum(t.shape[0] for t in chunk.pages),
            run_lengths=[t.shape[0] for t in chunk.pages],
            checksum=checksum(chunk.pages),
            last=chunk.last,
        )
        self._announce(transfer, announcement, sum(t.nbytes for t in chunk.pages))
        self._link.send(chunk.pages)

    def _announce(self, transfer: OutgoingTransfer, announcement: pb.Announcement, num_bytes: int) -> None:
        announcement.sequence = self._sequence
        self._sequence += 1

        def put() -> None:
            if not announcement.abort_reason:
                transfer.announced(announcement.sequence, announcement.HasField("last"), num_bytes)
            self._announcements.put_nowait(announcement)

        self.loop.call_soon_threadsafe(put)


class PageSender:
    """Keeps one link per decode worker and opens transfers on them. Event loop only.

    Args:
        incarnation: this worker's.
        identity: what the other end must share.
        config: kind and timeout of links, and the address of this end.
        ends: opens links; tests put other kinds in.
    """

    def __init__(
        self, *, incarnation: Incarnation, identity: Identity, config: TransportConfig, ends: LinkEnds | None = None
    ) -> None:
        self._incarnation, self._identity, self._config = incarnation, identity, config
        self._ends = ends or LinkEnds(config)
        self._links: dict[tuple[str, str], _OutgoingLink] = {}
        self._opening: dict[tuple[str, str], asyncio.Lock] = {}

    @property
    def num_links(self) -> int:
        """Links that work."""
        return sum(link.dead is None for link in self._links.values())

    async def open(self, ticket: pb.Ticket) -> OutgoingTransfer:
        """Start a transfer to the ticket's decode worker, opening a link to it if there is none.

        Raises:
            LinkMismatchError: the workers' identities differ.
            WorkerLostError: the decode worker is gone or another incarnation.
            TransferError: the link cannot be opened.
        """
        key = (ticket.decode_address, ticket.decode_incarnation)
        async with self._opening.setdefault(key, asyncio.Lock()):
            link = self._links.get(key)
            if link is None or link.dead is not None:
                await self._drop_dead_links()
                link = self._links[key] = await self._connect(ticket)
            return link.begin(ticket)

    async def close(self) -> None:
        """End all links; their transfers fail. Waits for link threads at most the links' timeout."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close(self._config.timeout_s) for link in links))

    async def _drop_dead_links(self) -> None:
        for key, link in list(self._links.items()):
            if link.dead is not None:
                del self._links[key]
                # Its thread ends by itself, at the latest when its send times out.
                await link.close(0.0)

    async def _connect(self, ticket: pb.Ticket) -> _OutgoingLink:
        timeout_s = self._config.timeout_s
        link_id = "link-" + secrets.token_hex(6)
        rendezvous = await asyncio.to_thread(self._ends.host, link_id)
        channel = connect(ticket.decode_address)
        try:
            offer = pb.LinkOffer(
                link_id=link_id,
                prefill_incarnation=self._incarnation,
                decode_incarnation=ticket.decode_incarnation,
                identity=identity_to_pb(self._identity),
                transport=self._config.kind,
                store_host=rendezvous.host,
                store_port=rendezvous.port,
                timeout_s=timeout_s,
            )
            await worker_pb2_grpc.PeerStub(channel).OpenLink(offer, timeout=timeout_s)
            link = await asyncio.to_thread(rendezvous.connect)
        except grpc.aio.AioRpcError as exc:
            await channel.close()
            raise error_from_status(exc, peer=f"decode worker {ticket.decode_address}") from exc
        except BaseException:
            await channel.close()
            raise
        return _OutgoingLink(link_id, link, channel, f"decode worker {ticket.decode_address}")
