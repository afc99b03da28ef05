"""What the decode end decides: which tickets are open, and what to do with each announced chunk.

Pure: events in, instructions out; no IO, no clock, no tensors, no threads.

    ticket   issued -> begun (by one link) -> filled (last chunk taken) -> closed: every chunk placed
                `----------`---------------------`-----------------------> closed: revoked, expired, given up,
                                                                           damaged, or its link ended
    chunk    announced -> receiving -> delivered -> answered
                              `-> dropped (its ticket was unknown, or closed meanwhile; answered then)

A ticket closes exactly once. A chunk is answered exactly once, unless its link ended first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phasor.core.errors import PhasorError, TransferError, TransferTimeoutError
from phasor.core.ids import Incarnation, TicketId

# ---- events


@dataclass(frozen=True, slots=True)
class Issued:
    """The owner opened a ticket for blocks `first_block` .. `first_block + num_blocks - 1`."""

    ticket_id: TicketId
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Revoked:
    """The owner closed a ticket; one that is not open is ignored."""

    ticket_id: TicketId


@dataclass(frozen=True, slots=True)
class Expired:
    """A ticket's deadline passed."""

    ticket_id: TicketId
    deadline_s: float


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A prefill worker got a new link. It gave up an older one of its own by asking for this one."""

    link_id: str
    prefill_incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Announced:
    """A chunk's bytes come next on the link."""

    link_id: str
    sequence: int
    ticket_id: TicketId
    first_block: int
    num_blocks: int
    run_lengths: tuple[int, ...]
    num_bytes: int
    last: bool


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The sender aborted a ticket, in order with what it announced."""

    link_id: str
    sequence: int
    ticket_id: TicketId
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A chunk's bytes are here; `intact` says whether their checksum is the announced one."""

    link_id: str
    sequence: int
    intact: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """The owner placed a delivered chunk (`why` empty) or does not want its ticket any more."""

    link_id: str
    sequence: int
    why: str


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """A link broke, or its stream ended. Its thread may still be stuck."""

    link_id: str
    error: PhasorError


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """An ended link's thread is gone, and with it what it was receiving into."""

    link_id: str


Event = (
    Issued
    | Revoked
    | Expired
    | LinkOpened
    | Announced
    | GivenUp
    | Received
    | Answered
    | LinkEnded
    | LinkClosed
)

# ---- instructions


@dataclass(frozen=True, slots=True)
class Receive:
    """Take the announced bytes off the link, wanted or not: the next chunk's come behind them."""

    link_id: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand the received, verified chunk to its ticket's owner."""

    link_id: str
    sequence: int
    ticket_id: TicketId


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell the sender: placed (`error` empty), or why the ticket is void."""

    link_id: str
    sequence: int
    ticket_id: TicketId
    error: str


@dataclass(frozen=True, slots=True)
class CloseTicket:
    """The ticket is closed: forget its deadline. `error` is set when its owner has yet to be told."""

    ticket_id: TicketId
    error: PhasorError | None


@dataclass(frozen=True, slots=True)
class EndLink:
    """Stop the link's thread and stream. Given once per link."""

    link_id: str
    error: PhasorError


Instruction = Receive | Deliver | Answer | CloseTicket | EndLink

# ---- state


@dataclass(slots=True)
class _Ticket:
    next_block: int
    end_block: int
    link_id: str = ""
    filled: bool = False


@dataclass(slots=True)
class _Link:
    prefill_incarnation: Incarnation
    next_sequence: int = 0
    ended: bool = False


@dataclass(slots=True)
class _Chunk:
    ticket_id: TicketId
    num_bytes: int
    delivered: bool = False
    answered: bool = False


class TicketBook:
    """The decode end's tickets, links, and the chunks between announcement and answer.

    Args:
        max_chunk_bytes: a larger announcement ends its link.
    """

    def __init__(self, max_chunk_bytes: int) -> None:
        self._max_chunk_bytes = max_chunk_bytes
        self._tickets: dict[TicketId, _Ticket] = {}
        self._links: dict[str, _Link] = {}
        self._chunks: dict[tuple[str, int], _Chunk] = {}
        self._handlers: dict[type, Callable[[Any], list[Instruction]]] = {
            Issued: self._issued,
            Revoked: self._revoked,
            Expired: self._expired,
            LinkOpened: self._link_opened,
            Announced: self._announced,
            GivenUp: self._given_up,
            Received: self._received,
            Answered: self._answered,
            LinkEnded: self._link_ended,
            LinkClosed: self._link_closed,
        }

    @property
    def num_open_tickets(self) -> int:
        """Tickets that may still receive pages, or whose pages are not placed yet."""
        return len(self._tickets)

    @property
    def open_tickets(self) -> tuple[TicketId, ...]:
        """Their ids."""
        return tuple(self._tickets)

    def is_open(self, ticket_id: TicketId) -> bool:
        """Whether a ticket is open."""
        return ticket_id in self._tickets

    def is_live(self, link_id: str) -> bool:
        """Whether a link is open and has not ended."""
        return link_id in self._links and not self._links[link_id].ended

    def staging_bytes(self, link_id: str | None = None) -> int:
        """Bytes announced and neither answered nor dropped, of one link or of all."""
        return sum(
            chunk.num_bytes for (link, _), chunk in self._chunks.items() if link_id is None or link == link_id
        )

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event; returns what to do about it, in order."""
        return self._handlers[type(event)](event)

    def _issued(self, event: Issued) -> list[Instruction]:
        assert event.ticket_id not in self._tickets, f"{event.ticket_id} issued twice"
        self._tickets[event.ticket_id] = _Ticket(event.first_block, event.first_block + event.num_blocks)
        return []

    def _revoked(self, event: Revoked) -> list[Instruction]:
        return self._close(event.ticket_id, None, "the ticket was revoked")

    def _expired(self, event: Expired) -> list[Instruction]:
        why = f"{event.ticket_id}: no complete transfer within {event.deadline_s:.1f} s"
        return self._close(event.ticket_id, TransferTimeoutError(why), why)

    def _link_opened(self, event: LinkOpened) -> list[Instruction]:
        assert event.link_id not in self._links, f"{event.link_id} opened twice"
        replaced: list[Instruction] = []
        for link_id, link in self._links.items():
            if link.prefill_incarnation == event.prefill_incarnation and not link.ended:
                error = TransferError(f"{link_id} was replaced by {event.link_id}")
                replaced += self._end(link_id, error)
        self._links[event.link_id] = _Link(event.prefill_incarnation)
        return replaced

    def _announced(self, event: Announced) -> list[Instruction]:
        wrong = self._count(event)
        if wrong is None:
            wrong = self._shape_error(event)
        if wrong == "":
            return self._announced_too_late(event)
        if wrong is not None:
            return self._end(event.link_id, TransferError(wrong))
        chunk = _Chunk(event.ticket_id, event.num_bytes)
        self._chunks[event.link_id, event.sequence] = chunk
        instructions: list[Instruction] = []
        refusal = self._refusal(event)
        if refusal:
            chunk.answered = True
            instructions.append(Answer(event.link_id, event.sequence, event.ticket_id, refusal))
            ticket = self._tickets.get(event.ticket_id)
            # A link that has no business with the ticket cannot void it.
            if ticket is not None and ticket.link_id in ("", event.link_id):
                error = TransferError(f"{event.ticket_id}: pages refused: {refusal}")
                instructions += self._close(event.ticket_id, error, refusal)
        else:
            ticket = self._tickets[event.ticket_id]
            ticket.link_id = event.link_id
            ticket.next_block += event.num_blocks
            ticket.filled = event.last
        return [*instructions, Receive(event.link_id, event.sequence)]

    def _announced_too_late(self, event: Announced) -> list[Instruction]:
        """Close a ticket that only a link that has ended asked for: its sender knows that, and its owner must."""
        ticket = self._tickets.get(event.ticket_id)
        if ticket is None or ticket.link_id:
            return []
        error = TransferError(f"{event.ticket_id}: the link that its pages were announced on has ended")
        return self._close(event.ticket_id, error, str(error))

    def _count(self, event: Announced | GivenUp) -> str | None:
        """Take the next sequence number; returns what is wrong with it, "" for a link that ended, None if right."""
        link = self._links.get(event.link_id)
        if link is None or link.ended:
            return ""
        if event.sequence != link.next_sequence:
            return f"announcement {event.sequence} came where {link.next_sequence} was next"
        link.next_sequence += 1
        return None

    def _shape_error(self, event: Announced) -> str | None:
        """Return why the bytes cannot even be received: where the next chunk's begin is then unknown."""
        runs = event.run_lengths
        if event.num_blocks < 0 or any(n <= 0 for n in runs) or sum(runs) != event.num_blocks:
            return f"runs of {list(runs[:8])} do not make {event.num_blocks} blocks"
        if event.num_bytes > self._max_chunk_bytes:
            return f"a chunk of {event.num_bytes} bytes was announced; at most {self._max_chunk_bytes}"
        return None

    def _refusal(self, event: Announced) -> str:
        """Return why a chunk is not wanted, or ""."""
        ticket = self._tickets.get(event.ticket_id)
        if ticket is None:
            return "no such ticket here: it was revoked, has expired, or never was"
        if ticket.link_id not in ("", event.link_id):
            return "another link has begun this ticket"
        if ticket.filled:
            return "the last chunk of this ticket was announced before"
        end = ticket.next_block + event.num_blocks
        if event.num_blocks and event.first_block != ticket.next_block:
            return f"blocks from {event.first_block} were announced, {ticket.next_block} is next"
        if end > ticket.end_block:
            return f"blocks up to {end} were announced, the ticket ends at {ticket.end_block}"
        if event.last and end != ticket.end_block:
            return f"the last chunk ends at block {end}, the ticket at {ticket.end_block}"
        return ""

    def _given_up(self, event: GivenUp) -> list[Instruction]:
        wrong = self._count(event)
        if wrong is not None:
            return self._end(event.link_id, TransferError(wrong)) if wrong else []
        ticket = self._tickets.get(event.ticket_id)
        if ticket is None or ticket.link_id not in ("", event.link_id):
            return []
        error = TransferError(f"{event.ticket_id}: the prefill worker gave up: {event.reason}")
        return self._close(event.ticket_id, error, "given up by its sender")

    def _received(self, event: Received) -> list[Instruction]:
        chunk = self._chunks[event.link_id, event.sequence]
        if chunk.answered or self._links[event.link_id].ended:
            del self._chunks[event.link_id, event.sequence]
            return []
        if not event.intact:
            why = (
                "checksum mismatch: the pages were damaged on their way, or overwritten before they were sent"
            )
            error = TransferError(f"{chunk.ticket_id}: {why}")
            closed = self._close(chunk.ticket_id, error, why)
            del self._chunks[event.link_id, event.sequence]
            return closed
        chunk.delivered = True
        return [Deliver(event.link_id, event.sequence, chunk.ticket_id)]

    def _answered(self, event: Answered) -> list[Instruction]:
        chunk = self._chunks.get((event.link_id, event.sequence))
        if chunk is None or not chunk.delivered:
            # Late (its ticket closed meanwhile), or the second answer.
            return []
        if event.why:
            return self._close(chunk.ticket_id, None, event.why)
        del self._chunks[event.link_id, event.sequence]
        answer = Answer(event.link_id, event.sequence, chunk.ticket_id, "")
        pending = any(c.ticket_id == chunk.ticket_id and not c.answered for c in self._chunks.values())
        if pending or not self._tickets[chunk.ticket_id].filled:
            return [answer]
        del self._tickets[chunk.ticket_id]
        return [answer, CloseTicket(chunk.ticket_id, None)]

    def _link_ended(self, event: LinkEnded) -> list[Instruction]:
        return self._end(event.link_id, event.error)

    def _link_closed(self, event: LinkClosed) -> list[Instruction]:
        link = self._links.pop(event.link_id)
        assert link.ended, f"{event.link_id} closed before it ended"
        for key in [key for key in self._chunks if key[0] == event.link_id]:
            del self._chunks[key]
        return []

    def _close(self, ticket_id: TicketId, error: PhasorError | None, answer: str) -> list[Instruction]:
        """Close a ticket if it is open, and answer its chunks. Those being received are dropped on arrival."""
        if self._tickets.pop(ticket_id, None) is None:
            return []
        instructions: list[Instruction] = []
        for (link_id, sequence), chunk in list(self._chunks.items()):
            if chunk.ticket_id != ticket_id or chunk.answered:
                continue
            chunk.answered = True
            if chunk.delivered:
                del self._chunks[link_id, sequence]
            if not self._links[link_id].ended:
                instructions.append(Answer(link_id, sequence, ticket_id, answer))
        return [*instructions, CloseTicket(ticket_id, error)]

    def _end(self, link_id: str, error: PhasorError) -> list[Instruction]:
        """End a link unless it has ended; the tickets that it began close with it, no others do."""
        link = self._links.get(link_id)
        if link is None or link.ended:
            return []
        link.ended = True
        instructions: list[Instruction] = [EndLink(link_id, error)]
        for ticket_id in [t for t, ticket in self._tickets.items() if ticket.link_id == link_id]:
            instructions += self._close(ticket_id, error, str(error))
        return instructions
