"""One link's prefill end: its stream, its thread, and the transfers that are on it.

Order: a piece's sequence number is drawn and its announcement posted under one lock, by the link's thread, which
sends bytes in the order of their announcements, at most one piece behind: while one piece travels, the other end
learns of the next, and never waits with the link idle for an announcement to find its way through gRPC. An abort has
no bytes and may be announced by any thread in between.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import torch

from phasor.core.errors import PhasorError, TransferError, TransferTimeoutError, WorkerLostError
from phasor.transport.checksum import checksum
from phasor.transport.ledger import TransferLedger, split_runs
from phasor.transport.link import Link
from phasor.transport.loops import post
from phasor.v1 import worker_pb2 as pb
from phasor.v1 import worker_pb2_grpc
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


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """How much a link takes on at once."""

    max_piece_bytes: int
    """Larger chunks are announced and sent in pieces (of one block at least)."""
    max_unacknowledged_bytes: int
    """Beyond it the link waits for the other end to place what it has."""
    min_run_bytes: int = 0
    """A piece whose runs are smaller on average is copied together first and sent as one message: each message costs
    both ends a meeting, the copy only memory bandwidth."""


class OutgoingTransfer:
    """One ticket's pages on their way. Made by `PageSender.open`."""

    def __init__(self, ticket: pb.Ticket, link: "OutgoingLink", default_deadline_s: float) -> None:
        self.ticket_id = ticket.ticket_id
        self.deadline_s = time.monotonic() + (ticket.deadline_s or default_deadline_s)
        """When the ticket is void, on the monotonic clock."""
        self.ledger = TransferLedger()
        """Guarded by the link's lock."""
        self._link = link
        self._ended = False
        self._outcome: asyncio.Future[None] = link.loop.create_future()
        # A transfer may be dropped without anybody asking how it ended.
        self._outcome.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def num_bytes(self) -> int:
        """Bytes of pages announced so far."""
        return self.ledger.num_bytes

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be sent: acknowledged, refused, aborted, or its link broke."""
        return self._ended

    def push(self, chunk: PageChunk) -> None:
        """Queue a chunk; any thread, never blocks. After the transfer ended it is ignored.

        The blocks must stay held until `wait_acknowledged` returns or raises, or `abort` was called; a later
        overwrite can only spoil the checksum of a void ticket.
        """
        if not self._ended:
            self._link.enqueue(self, chunk)

    async def wait_acknowledged(self, timeout_s: float) -> None:
        """Wait until the last chunk was pushed and every chunk acknowledged.

        Raises:
            TransferTimeoutError: not within `timeout_s`; the transfer goes on until `abort`.
            TransferError: the decode worker refused a chunk, the link broke, or the transfer was aborted.
            WorkerLostError: the decode worker is gone.
        """
        try:
            await asyncio.wait_for(asyncio.shield(self._outcome), timeout_s)
        except TimeoutError as exc:
            raise TransferTimeoutError(
                f"{self.ticket_id}: not acknowledged within {timeout_s:.1f} s"
            ) from exc

    def abort(self, reason: str) -> None:
        """Give the ticket up and tell the other end; any thread, idempotent, never blocks. Not after it ended."""
        if not self._ended:
            self._link.give_up(self, reason or "no reason given")

    def settle(self, error: PhasorError | None) -> None:
        """End with `error`, or well; any thread, the first call counts. For the link."""
        self._ended = True
        post(self._link.loop, self._set_outcome, error)

    def _set_outcome(self, error: PhasorError | None) -> None:
        if self._outcome.done():
            return
        if error is None:
            self._outcome.set_result(None)
        else:
            self._outcome.set_exception(error)


class OutgoingLink:
    """Stream, thread and link to one decode worker incarnation. Make it in the event loop's thread.

    Args:
        link_id: as offered to the other end.
        link: the connected end; this object's from now on.
        channel: to the decode worker; this object's from now on.
        peer: who that is, for messages.
        limits: how much it takes on at once.
        on_dead: called in the event loop, once, when the link has ended for whatever reason.
    """

    def __init__(
        self,
        link_id: str,
        link: Link,
        channel: grpc.aio.Channel,
        peer: str,
        limits: LinkLimits,
        on_dead: Callable[["OutgoingLink"], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.dead: PhasorError | None = None
        """Why the link ended."""
        self._link_id, self._link, self._channel, self._peer = link_id, link, channel, peer
        self._limits, self._on_dead = limits, on_dead
        # Guards transfers, their ledgers and the sequence; notified when any of them changed.
        self._changed = threading.Condition()
        self._transfers: dict[str, OutgoingTransfer] = {}
        self._sequence = 0
        self._work: queue.SimpleQueue[tuple[OutgoingTransfer, PageChunk] | None] = queue.SimpleQueue()
        self._unsent: list[torch.Tensor] = []
        """The piece that is announced and whose bytes are next. The link's thread only."""
        self._buffers: list[torch.Tensor | None] = [None, None]
        """For runs that are copied together. The link's thread only."""
        self._announcements: asyncio.Queue[pb.Announcement | None] = asyncio.Queue()
        self._stream = worker_pb2_grpc.PeerStub(channel).Transfer(self._outgoing())
        self._reader = asyncio.create_task(self._read_acknowledgements(), name=f"acks {link_id}")
        self._thread = threading.Thread(target=self._run, name=f"phasor-out-{link_id}", daemon=True)
        self._thread.start()

    def begin(self, ticket: pb.Ticket, default_deadline_s: float) -> OutgoingTransfer:
        """Start a transfer; event loop only.

        Raises:
            PhasorError: why the link ended.
        """
        transfer = OutgoingTransfer(ticket, self, default_deadline_s)
        with self._changed:
            if self.dead is not None:
                raise self.dead
            if ticket.ticket_id in self._transfers:
                raise TransferError(f"{ticket.ticket_id} is being transferred already")
            self._transfers[ticket.ticket_id] = transfer
        return transfer

    def enqueue(self, transfer: OutgoingTransfer, chunk: PageChunk) -> None:
        """Queue a chunk for the link's thread; any thread, never blocks."""
        self._work.put((transfer, chunk))

    def give_up(self, transfer: OutgoingTransfer, reason: str) -> None:
        """End a transfer and announce that; any thread, never blocks."""
        with self._changed:
            if transfer.ended or self.dead is not None:
                return
            self._finish(transfer, TransferError(f"{transfer.ticket_id} was given up: {reason}"))
            self._announce(pb.Announcement(ticket_id=transfer.ticket_id, abort_reason=reason))

    def fail(self, error: PhasorError) -> None:
        """End the link and all its transfers; event loop only, idempotent, never blocks."""
        with self._changed:
            if self.dead is not None:
                return
            self.dead = error
            for transfer in list(self._transfers.values()):
                self._finish(transfer, error)
            self._changed.notify_all()
        _log.info("%s to %s ended: %s", self._link_id, self._peer, error)
        self._work.put(None)
        # Ends the stream behind what is announced: the other end closes those tickets now, not at their deadlines.
        self._announcements.put_nowait(None)
        self._link.close()
        self._on_dead(self)

    async def close(self, timeout_s: float) -> None:
        """End the link, its stream and channel, and wait for its thread, at most `timeout_s` each."""
        self.fail(TransferError("the prefill worker is stopping"))
        await asyncio.wait({self._reader}, timeout=timeout_s)
        self._stream.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _finish(self, transfer: OutgoingTransfer, error: PhasorError | None) -> None:
        """Forget a transfer; the lock is held."""
        self._transfers.pop(transfer.ticket_id, None)
        transfer.settle(error)
        self._changed.notify_all()

    def _announce(self, announcement: pb.Announcement) -> int:
        """Number an announcement and post it; the lock is held, so that both happen in one order."""
        announcement.sequence = self._sequence
        self._sequence += 1
        post(self.loop, self._announcements.put_nowait, announcement)
        return announcement.sequence

    async def _outgoing(self) -> AsyncIterator[pb.Announcement]:
        yield pb.Announcement(link_id=self._link_id)
        while (announcement := await self._announcements.get()) is not None:
            yield announcement

    async def _read_acknowledgements(self) -> None:
        try:
            async for acknowledgement in self._stream:
                self._take_acknowledgement(acknowledgement)
            self.fail(TransferError(f"{self._peer} closed the link"))
        except grpc.aio.AioRpcError as exc:
            self.fail(link_error(exc, self._peer))

    def _take_acknowledgement(self, answer: pb.Acknowledgement) -> None:
        with self._changed:
            transfer = self._transfers.get(answer.ticket_id)
            if transfer is None:
                return
            if answer.error:
                error = TransferError(f"{transfer.ticket_id}: {self._peer} refused pages: {answer.error}")
                self._finish(transfer, error)
                return
            transfer.ledger.acknowledged(answer.sequence)
            self._changed.notify_all()
            if transfer.ledger.complete:
                self._finish(transfer, None)

    def _run(self) -> None:
        """The link's thread: one chunk after the other."""
        try:
            while (item := self._work.get()) is not None:
                self._send(*item)
                if self._work.empty():
                    self._flush()
        except PhasorError as exc:
            post(self.loop, self.fail, exc)
        except Exception as exc:  # the top of this thread: whatever it was, its transfers must end
            _log.exception("bug in the thread of %s", self._link_id)
            error = TransferError(f"{self._link_id}: internal error ({type(exc).__name__})")
            post(self.loop, self.fail, error)

    def _send(self, transfer: OutgoingTransfer, chunk: PageChunk) -> None:
        runs = [page.shape[0] for page in chunk.pages]
        block_bytes = next((page.nbytes // n for page, n in zip(chunk.pages, runs, strict=True) if n), 1)
        pieces = split_runs(runs, max(1, self._limits.max_piece_bytes // block_bytes)) or [[]]
        first_block = chunk.first_block
        for index, piece in enumerate(pieces):
            if transfer.ended:
                return
            tensors = self._tensors([chunk.pages[run][start:stop] for run, start, stop in piece])
            announcement = pb.Announcement(
                ticket_id=transfer.ticket_id,
                first_block=first_block,
                num_blocks=sum(t.shape[0] for t in tensors),
                run_lengths=[t.shape[0] for t in tensors],
                checksum=checksum(tensors),
                last=chunk.last if index == len(pieces) - 1 else None,
            )
            num_bytes = sum(t.nbytes for t in tensors)
            if not self._has_room(num_bytes):
                # What makes room are acknowledgements, of this piece's bytes among others.
                self._flush()
            if not self._begin_piece(transfer, announcement, num_bytes):
                return
            self._flush()
            self._unsent = tensors
            first_block += announcement.num_blocks

    def _tensors(self, runs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what to send: the runs themselves, or all of them in one."""
        num_bytes = sum(run.nbytes for run in runs)
        if len(runs) < 2 or num_bytes >= len(runs) * self._limits.min_run_bytes:
            return [run.to(self._link.device) for run in runs]
        num_blocks = sum(run.shape[0] for run in runs)
        # Two buffers, in turns: the one taken before may hold the piece that is announced and not sent.
        packed = self._buffers.pop(0)
        if packed is None or packed.shape[0] < num_blocks or packed.dtype != runs[0].dtype:
            packed = torch.empty(num_blocks, *runs[0].shape[1:], dtype=runs[0].dtype, device=runs[0].device)
        self._buffers.append(packed)
        return [torch.cat(runs, out=packed[:num_blocks]).to(self._link.device)]

    def _flush(self) -> None:
        """Send the bytes that are announced. They must follow even if their transfer has ended meanwhile."""
        tensors, self._unsent = self._unsent, []
        self._link.send(tensors)

    def _has_room(self, num_bytes: int) -> bool:
        with self._changed:
            return self._is_free(num_bytes)

    def _is_free(self, num_bytes: int) -> bool:
        """Return whether the window takes `num_bytes` more; the lock is held."""
        held = sum(other.ledger.unacknowledged_bytes for other in self._transfers.values())
        return held == 0 or held + num_bytes <= self._limits.max_unacknowledged_bytes

    def _begin_piece(self, transfer: OutgoingTransfer, announcement: pb.Announcement, num_bytes: int) -> bool:
        """Wait for the window to take `num_bytes` more, then announce; returns whether the bytes must follow."""
        with self._changed:
            # A busy decode worker is not a dead one, so this wait ends with the ticket, not with the link.
            in_time = self._changed.wait_for(
                lambda: self.dead is not None or transfer.ended or self._is_free(num_bytes),
                max(0.0, transfer.deadline_s - time.monotonic()),
            )
            if self.dead is not None or transfer.ended:
                return False
            if not in_time:
                message = f"{transfer.ticket_id}: the decode worker did not place pages before the deadline"
                self._finish(transfer, TransferTimeoutError(message))
                return False
            sequence = self._announce(announcement)
            transfer.ledger.announced(sequence, num_bytes, last=announcement.HasField("last"))
            return True


def link_error(exc: grpc.aio.AioRpcError, peer: str) -> PhasorError:
    """Return what a failed call of Peer means for transfers: never an error of the request itself."""
    error = error_from_status(exc, peer=peer)
    if isinstance(error, TransferError | WorkerLostError):
        return error
    if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TransferTimeoutError(f"{peer} did not answer in time")
    return TransferError(f"{peer} broke the link: {error}")
