"""Which tickets are open, and whether an announcement fits its ticket. Pure: no IO, no clock, no tensors.

    issued -> begun (by one link) -> filled (last chunk taken) -> revoked
      |          |                     |
      +----------+---------------------+--> revoked (by the owner, in any state) or failed (deadline, link, abort)
"""

from dataclasses import dataclass, field

from phasor.core.ids import TicketId


@dataclass(slots=True)
class OpenTicket:
    """A ticket whose pages may still arrive."""

    ticket_id: TicketId
    end_block: int
    """One past the last block to be filled."""
    next_block: int
    """Chunks arrive in order, so this is what the next one must start with."""
    link_id: str = ""
    """The link that began it; another one may not go on with it."""
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """What an announcement says about pages."""

    ticket_id: TicketId
    first_block: int
    num_blocks: int
    run_lengths: tuple[int, ...]
    last: bool


@dataclass(slots=True)
class TicketBook:
    """The decode worker's open tickets."""

    _open: dict[TicketId, OpenTicket] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, ticket_id: TicketId) -> bool:
        return ticket_id in self._open

    def issue(self, ticket_id: TicketId, first_block: int, num_blocks: int) -> None:
        """Open a ticket for blocks `first_block` .. `first_block + num_blocks - 1`."""
        assert ticket_id not in self._open, f"{ticket_id} issued twice"
        self._open[ticket_id] = OpenTicket(ticket_id, first_block + num_blocks, first_block)

    def take(self, chunk: Chunk, link_id: str) -> str:
        """Note an announced chunk; returns why it is not wanted, or "" when it is.

        A chunk that is not wanted voids nothing by itself: unknown tickets have no owner, and an owner is told
        with `fail`.
        """
        ticket = self._open.get(chunk.ticket_id)
        if ticket is None:
            return "no such ticket here; it was revoked, has expired, or never was"
        if ticket.filled:
            return "the ticket is filled already"
        if ticket.link_id not in ("", link_id):
            return "another link has begun this ticket"
        end = chunk.first_block + chunk.num_blocks
        if chunk.num_blocks and chunk.first_block != ticket.next_block:
            return f"blocks from {chunk.first_block} announced, {ticket.next_block} is next"
        if end > ticket.end_block and chunk.num_blocks:
            return f"blocks up to {end} announced, the ticket ends at {ticket.end_block}"
        if chunk.last and ticket.next_block + chunk.num_blocks != ticket.end_block:
            return f"last chunk ends at {end}, the ticket at {ticket.end_block}"
        ticket.link_id = link_id
        ticket.next_block += chunk.num_blocks
        ticket.filled = chunk.last
        return ""

    def fail(self, ticket_id: TicketId) -> bool:
        """Void a ticket; True when it was open, so that its owner must be told."""
        return self._open.pop(ticket_id, None) is not None

    def revoke(self, ticket_id: TicketId) -> None:
        """Void a ticket at its owner's wish. Idempotent."""
        self._open.pop(ticket_id, None)

    def close_filled(self, ticket_id: TicketId) -> None:
        """Close a ticket whose last chunk was placed."""
        ticket = self._open.get(ticket_id)
        if ticket is not None and ticket.filled:
            del self._open[ticket_id]

    def begun_on(self, link_id: str) -> list[TicketId]:
        """Return the open tickets that a broken link takes with it."""
        return [t.ticket_id for t in self._open.values() if t.link_id == link_id]


def shape_error(num_blocks: int, run_lengths: tuple[int, ...], max_blocks: int) -> str:
    """Return why the bytes of an announcement cannot even be received, or "".

    Unlike a chunk that is merely not wanted, this ends the link: where the next announcement's bytes begin is
    unknown.
    """
    if num_blocks < 0 or num_blocks > max_blocks:
        return f"{num_blocks} blocks announced; at most {max_blocks} at once"
    if any(n <= 0 for n in run_lengths) or sum(run_lengths) != num_blocks:
        return f"runs of {list(run_lengths)} do not make {num_blocks} blocks"
    return ""
