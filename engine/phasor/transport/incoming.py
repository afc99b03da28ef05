"""One link's decode end: a thread that joins it and then takes announced pages off it, in order."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from phasor.core.errors import PhasorError, TransferError
from phasor.core.ids import TicketId
from phasor.transport.checksum import checksum
from phasor.transport.link import Link
from phasor.transport.tickets import Chunk, shape_error
from phasor.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from phasor.transport.receiver import PageReceiver

MAX_STAGING_BYTES = 256 * 2**20
"""Staged but not yet placed bytes per link; beyond it the sender waits."""

MAX_CHUNK_BLOCKS = 65_536

_log = logging.getLogger(__name__)


class IncomingLink:
    """Owned by a PageReceiver. Its thread alone touches the process group."""

    def __init__(
        self, receiver: "PageReceiver", offer: pb.LinkOffer, ended: Callable[["IncomingLink", PhasorError], None]
    ) -> None:
        self.link_id = offer.link_id
        self.answers: asyncio.Queue[pb.Acknowledgement | None] = asyncio.Queue()
        self.streaming = False
        self.error: PhasorError | None = None
        """Why the link ended, for the other end; None after an orderly end."""
        self._receiver, self._offer, self._ended = receiver, offer, ended
        self._work: queue.SimpleQueue[pb.Announcement | None] = queue.SimpleQueue()
        self._next_sequence = 0
        self._staged = threading.Condition()
        self._staging_bytes = 0
        self._ending: PhasorError | None = None
        self._thread = threading.Thread(target=self._run, name=f"phasor-{self.link_id}", daemon=True)

    @property
    def staging_bytes(self) -> int:
        """Bytes received or being received that are not placed or dropped yet."""
        return self._staging_bytes

    def start(self) -> None:
        """Begin to join the link."""
        self._thread.start()

    def announce(self, announcement: pb.Announcement) -> None:
        """Queue an announcement for the thread; never blocks."""
        self._work.put(announcement)

    def end(self, reason: PhasorError) -> None:
        """Ask the thread to end; idempotent, never blocks. A thread stuck in `recv` ends at its timeout."""
        if self._ending is None:
            self._ending = reason
        self._work.put(None)
        with self._staged:
            self._staged.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        error: PhasorError | None = None
        link: Link | None = None
        try:
            link = self._receiver.ends.join(self.link_id, self._offer.store_host, self._offer.store_port)
            while self._ending is None and (announcement := self._work.get(timeout=None)) is not None:
                self._take(link, announcement)
        except PhasorError as exc:
            error = self.error = exc
            _log.warning("%s ended: %s", self.link_id, exc)
        finally:
            if link is not None:
                link.close()
            with self._staged:
                self._staging_bytes = 0
            self._ended(self, error or self._ending or TransferError("the link ended"))
            self._receiver.loop.call_soon_threadsafe(self.answers.put_nowait, None)

    def _take(self, link: Link, announcement: pb.Announcement) -> None:
        if announcement.sequence != self._next_sequence:
            raise TransferError(f"announcement {announcement.sequence} came where {self._next_sequence} was next")
        self._next_sequence += 1
        ticket_id = TicketId(announcement.ticket_id)
        if announcement.abort_reason:
            self._receiver.fail(ticket_id, TransferError(f"the prefill worker gave up: {announcement.abort_reason}"))
            return
        runs = tuple(announcement.run_lengths)
        wrong = shape_error(announcement.num_blocks, runs, MAX_CHUNK_BLOCKS)
        if wrong:
            raise TransferError(wrong)
        chunk = Chunk(
            ticket_id, announcement.first_block, announcement.num_blocks, runs, announcement.HasField("last")
        )
        refusal = self._receiver.tickets.take(chunk, self.link_id)
        pages, num_bytes = self._receive(link, announcement.num_blocks, runs)
        if not refusal and checksum([] if pages is None else [pages]) != announcement.checksum:
            refusal = "checksum mismatch"
        if refusal:
            self._give_back(num_bytes)
            self._answer(announcement, refusal)
            self._receiver.fail(ticket_id, TransferError(f"pages refused: {refusal}"))
            return
        self._deliver(announcement, pages, num_bytes)

    def _receive(self, link: Link, num_blocks: int, runs: tuple[int, ...]) -> tuple[torch.Tensor | None, int]:
        if num_blocks == 0:
            return None, 0
        heads, elements = self._receiver.block_shape
        num_bytes = num_blocks * heads * elements * self._receiver.dtype.itemsize
        with self._staged:
            fits = self._staged.wait_for(
                lambda: self._ending is not None
                or self._staging_bytes == 0
                or self._staging_bytes + num_bytes <= MAX_STAGING_BYTES,
                timeout=self._receiver.config.timeout_s,
            )
            if not fits:
                raise TransferError(f"{self._staging_bytes} staged bytes were not placed in time")
            self._staging_bytes += num_bytes
        pages = torch.empty(num_blocks, heads, elements, dtype=self._receiver.dtype)
        link.recv(list(pages.split(list(runs))))
        self._receiver.bytes_received += num_bytes
        return pages, num_bytes

    def _deliver(self, announcement: pb.Announcement, pages: torch.Tensor | None, num_bytes: int) -> None:
        from phasor.transport.receiver import ChunkArrived

        answered = threading.Lock()
        ticket_id = TicketId(announcement.ticket_id)

        def acknowledge(why: str) -> None:
            if not answered.acquire(blocking=False):
                return
            self._give_back(num_bytes)
            if why:
                self._receiver.fail(ticket_id, TransferError(why))
            else:
                self._receiver.tickets.close_filled(ticket_id)
            self._answer(announcement, why)

        last = announcement.last if announcement.HasField("last") else None
        self._receiver.deliver(ChunkArrived(ticket_id, announcement.first_block, pages, last, acknowledge))

    def _give_back(self, num_bytes: int) -> None:
        with self._staged:
            self._staging_bytes = max(0, self._staging_bytes - num_bytes)
            self._staged.notify_all()

    def _answer(self, announcement: pb.Announcement, error: str) -> None:
        answer = pb.Acknowledgement(ticket_id=announcement.ticket_id, sequence=announcement.sequence, error=error)
        self._receiver.loop.call_soon_threadsafe(self.answers.put_nowait, answer)
