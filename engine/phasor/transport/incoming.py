"""One link's decode end: a thread that joins it and then takes announced chunks off it, in order."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from phasor.core.errors import PhasorError, TransferError
from phasor.core.ids import TicketId
from phasor.transport.checksum import checksum
from phasor.transport.events import ChunkArrived, TransferEvent
from phasor.transport.link import Link
from phasor.transport.tickets import (
    Announced,
    Answered,
    Deliver,
    Event,
    GivenUp,
    Instruction,
    LinkClosed,
    LinkEnded,
    Receive,
    Received,
)
from phasor.v1 import worker_pb2 as pb

MAX_SPARE_BUFFERS = 2
"""Buffers that a link keeps for the chunks to come: one on the link, one being placed."""

_log = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """What a link's thread needs of its PageReceiver. Everything may be called in any thread."""

    deliver: Callable[[TransferEvent], None]
    block_shape: tuple[int, int]
    dtype: torch.dtype

    def apply(self, event: Event) -> list[Instruction]:
        """Have the ticket book handle an event, and carry out what it says; returns that too."""
        ...

    def wait_for_room(self, link_id: str, num_bytes: int) -> None:
        """Block until so much more may be staged, or the link has ended."""
        ...

    def count_received(self, num_bytes: int) -> None:
        """Note bytes that arrived intact."""
        ...


class IncomingLink:
    """Owned by a PageReceiver. Its thread alone sends or receives on the link."""

    def __init__(self, link_id: str, prefill_incarnation: str, owner: LinkOwner) -> None:
        self.link_id, self.prefill_incarnation = link_id, prefill_incarnation
        self.answers: asyncio.Queue[pb.Acknowledgement | None] = asyncio.Queue()
        """For the stream; None is the end. Event loop only."""
        self.error: PhasorError | None = None
        """Why the link ended."""
        self.streaming = False
        """Whether the announcements' stream has come."""
        self._is_over = False
        self._owner = owner
        self._work: queue.SimpleQueue[pb.Announcement | None] = queue.SimpleQueue()
        # Memory that the kernel has to find anew for every chunk costs about as much as receiving it.
        self._spares: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._link: Link | None = None
        self._thread: threading.Thread | None = None

    def start(self, join: Callable[[], Link]) -> None:
        """Begin to join the link with `join`, in the link's thread."""
        self._thread = threading.Thread(
            target=self._run, args=(join,), name=f"phasor-in-{self.link_id}", daemon=True
        )
        self._thread.start()

    def announce(self, announcement: pb.Announcement) -> None:
        """Queue an announcement for the thread; never blocks."""
        self._work.put(announcement)
        if self._is_over:
            self._take_the_rest()

    def stop(self, error: PhasorError) -> None:
        """Have the thread end; any thread, never blocks. In `recv` of a link that cannot fence, its timeout ends it."""
        self.error = error
        self._work.put(None)
        link = self._link
        if link is not None:
            link.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, join: Callable[[], Link]) -> None:
        error: PhasorError = TransferError(f"{self.link_id} ended")
        try:
            self._link = link = join()
            while self.error is None and (announcement := self._work.get()) is not None:
                self._take(link, announcement)
        except PhasorError as exc:
            error = exc
        except Exception as exc:  # the top of this thread: whatever it was, tickets and staging must go
            _log.exception("bug in the thread of %s", self.link_id)
            error = TransferError(f"{self.link_id}: internal error ({type(exc).__name__})")
        finally:
            if self._link is not None:
                self._link.close()
            self._owner.apply(LinkEnded(self.link_id, error))
            self._is_over = True
            self._take_the_rest()
            self._owner.apply(LinkClosed(self.link_id))

    def _take_the_rest(self) -> None:
        """Announce what came before the end and was not looked at: no owner should wait for its ticket's deadline."""
        while True:
            try:
                announcement = self._work.get_nowait()
            except queue.Empty:
                return
            if announcement is not None and not announcement.abort_reason:
                self._owner.apply(self._announced(announcement))

    def _take(self, link: Link, announcement: pb.Announcement) -> None:
        ticket_id = TicketId(announcement.ticket_id)
        if announcement.abort_reason:
            reason = announcement.abort_reason
            self._owner.apply(GivenUp(self.link_id, announcement.sequence, ticket_id, reason))
            return
        event = self._announced(announcement)
        self._owner.wait_for_room(self.link_id, event.num_bytes)
        if not any(isinstance(instruction, Receive) for instruction in self._owner.apply(event)):
            return
        pages = self._receive(link, event)
        intact = checksum([] if pages is None else [pages]) == announcement.checksum
        if intact:
            self._owner.count_received(event.num_bytes)
        instructions = self._owner.apply(Received(self.link_id, event.sequence, intact))
        if any(isinstance(instruction, Deliver) for instruction in instructions):
            self._deliver(announcement, pages)

    def _announced(self, announcement: pb.Announcement) -> Announced:
        heads, elements = self._owner.block_shape
        return Announced(
            self.link_id,
            announcement.sequence,
            TicketId(announcement.ticket_id),
            announcement.first_block,
            announcement.num_blocks,
            tuple(announcement.run_lengths),
            max(0, announcement.num_blocks) * heads * elements * self._owner.dtype.itemsize,
            announcement.HasField("last"),
        )

    def _receive(self, link: Link, event: Announced) -> torch.Tensor | None:
        """Take a chunk's bytes off the link into memory that is nobody else's until it is delivered."""
        if event.num_blocks == 0:
            return None
        pages = self._staging(event.num_blocks, link.device)
        link.recv(torch.split(pages, list(event.run_lengths)))
        return pages

    def _staging(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        try:
            spare = self._spares.get_nowait()
        except queue.Empty:
            spare = None
        if spare is None or spare.shape[0] < num_blocks:
            spare = torch.empty(num_blocks, *self._owner.block_shape, dtype=self._owner.dtype, device=device)
        return spare[:num_blocks]

    def _recycle(self, pages: torch.Tensor | None) -> None:
        """Keep a chunk's memory for another one; its owner has said that it is done with it.

        Not on a GPU, where the copy that the owner made may still be under way.
        """
        if pages is not None and pages.is_cpu and self._spares.qsize() < MAX_SPARE_BUFFERS:
            self._spares.put(pages if pages._base is None else pages._base)

    def _deliver(self, announcement: pb.Announcement, pages: torch.Tensor | None) -> None:
        link_id, sequence, owner = self.link_id, announcement.sequence, self._owner

        unanswered = [pages]

        def acknowledge(why: str) -> None:
            try:
                self._recycle(unanswered.pop())
            except IndexError:
                # The second answer: the memory may be another chunk's by now.
                return
            owner.apply(Answered(link_id, sequence, why))

        last = announcement.last if announcement.HasField("last") else None
        owner.deliver(
            ChunkArrived(TicketId(announcement.ticket_id), announcement.first_block, pages, last, acknowledge)
        )
