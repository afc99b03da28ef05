"""Random histories of the decode end's ticket book: links that end at any moment, bytes that come late or damaged.

After every step: a ticket closes once, its chunks are answered once unless their link ended, nothing is delivered for
a ticket that is closed, and when all links are gone and all tickets closed nothing is staged.
"""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phasor.core.errors import TransferError
from phasor.core.ids import Incarnation, TicketId
from phasor.transport import tickets as tk

BLOCK_BYTES = 10
NUMBER = st.integers(0, 1000)


@dataclass
class Link:
    """One link as its thread and stream see it."""

    incarnation: Incarnation
    sequence: int = 0
    ended: bool = False
    receiving: list[int] = field(default_factory=list)
    """Announced, bytes not here yet; taken in order."""


class Book(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = tk.TicketBook(max_chunk_bytes=1000)
        self.links: dict[str, Link] = {}
        self.issued: dict[TicketId, tuple[int, int]] = {}
        self.next_block: dict[TicketId, int] = {}
        self.closed: set[TicketId] = set()
        self.chunks: dict[tuple[str, int], TicketId] = {}
        self.answered: set[tuple[str, int]] = set()
        self.delivered: set[tuple[str, int]] = set()
        self.num_links = 0

    def tell(self, event: tk.Event) -> list[tk.Instruction]:
        instructions = self.book.handle(event)
        for instruction in instructions:
            match instruction:
                case tk.Receive(link_id, sequence):
                    self.links[link_id].receiving.append(sequence)
                case tk.Deliver(link_id, sequence, ticket_id):
                    assert ticket_id not in self.closed, "pages for a closed ticket are delivered"
                    assert (link_id, sequence) not in self.delivered
                    self.delivered.add((link_id, sequence))
                case tk.Answer(link_id, sequence, ticket_id, error):
                    assert (link_id, sequence) not in self.answered, "a chunk is answered twice"
                    assert not self.links[link_id].ended, "an answer to a link that ended"
                    assert self.chunks[link_id, sequence] == ticket_id
                    assert error or (link_id, sequence) in self.delivered, "not placed, but acknowledged"
                    self.answered.add((link_id, sequence))
                case tk.CloseTicket(ticket_id):
                    assert ticket_id not in self.closed, "a ticket closes twice"
                    self.closed.add(ticket_id)
                case tk.EndLink(link_id):
                    assert not self.links[link_id].ended, "a link ends twice"
                    self.links[link_id].ended = True
        return instructions

    # --- tickets -----------------------------------------------------------------------------------------

    @rule(first=st.integers(0, 3), count=st.integers(1, 5))
    def issue(self, first: int, count: int) -> None:
        ticket_id = TicketId(f"t{len(self.issued)}")
        self.issued[ticket_id] = (first, first + count)
        self.next_block[ticket_id] = first
        self.tell(tk.Issued(ticket_id, first, count))

    @precondition(lambda self: self.issued)
    @rule(number=NUMBER, expired=st.booleans())
    def revoke(self, number: int, expired: bool) -> None:
        ticket_id = self.ticket(number)
        self.tell(tk.Expired(ticket_id, 1.0) if expired else tk.Revoked(ticket_id))
        assert not self.book.is_open(ticket_id)

    # --- links -------------------------------------------------------------------------------------------

    @rule(worker=st.integers(0, 2))
    def open_link(self, worker: int) -> None:
        self.num_links += 1
        link_id, incarnation = f"l{self.num_links}", Incarnation(f"inc-{worker}")
        self.links[link_id] = Link(incarnation)
        self.tell(tk.LinkOpened(link_id, incarnation))
        live = [link for link in self.links.values() if link.incarnation == incarnation and not link.ended]
        assert len(live) == 1, "one link per prefill worker"

    @precondition(lambda self: self.links)
    @rule(number=NUMBER)
    def end_link(self, number: int) -> None:
        link_id = self.link(number)
        self.tell(tk.LinkEnded(link_id, TransferError("the stream ended")))
        assert not self.book.is_live(link_id)

    @precondition(lambda self: any(link.ended for link in self.links.values()))
    @rule(number=NUMBER)
    def close_link(self, number: int) -> None:
        ended = [link_id for link_id, link in self.links.items() if link.ended]
        link_id = ended[number % len(ended)]
        self.tell(tk.LinkClosed(link_id))
        assert self.book.staging_bytes(link_id) == 0
        del self.links[link_id]

    # --- chunks ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.links and self.issued)
    @rule(link=NUMBER, ticket=NUMBER, count=st.integers(0, 5), shift=st.sampled_from([0, 0, 0, 0, 1]))
    def announce(self, link: int, ticket: int, count: int, shift: int) -> None:
        link_id, ticket_id = self.link(link), self.ticket(ticket)
        first, end = self.next_block[ticket_id] + shift, self.issued[ticket_id][1]
        count = min(count, max(0, end - first)) if shift == 0 else count
        last = first + count == end
        sequence = self.take_sequence(link_id)
        self.chunks[link_id, sequence] = ticket_id
        runs = (count,) if count else ()
        event = tk.Announced(link_id, sequence, ticket_id, first, count, runs, count * BLOCK_BYTES, last)
        accepted = self.tell(event)
        refused = any(isinstance(i, tk.Answer) and i.sequence == sequence for i in accepted)
        if accepted and not refused:
            self.next_block[ticket_id] = first + count

    @precondition(lambda self: self.links and self.issued)
    @rule(link=NUMBER, ticket=NUMBER)
    def give_up(self, link: int, ticket: int) -> None:
        link_id = self.link(link)
        sequence = self.take_sequence(link_id)
        self.tell(tk.GivenUp(link_id, sequence, self.ticket(ticket), "cancelled"))

    @precondition(lambda self: any(link.receiving for link in self.links.values()))
    @rule(number=NUMBER, intact=st.sampled_from([True, True, True, False]))
    def receive(self, number: int, intact: bool) -> None:
        busy = [link_id for link_id, link in self.links.items() if link.receiving]
        link_id = busy[number % len(busy)]
        self.tell(tk.Received(link_id, self.links[link_id].receiving.pop(0), intact))

    @precondition(lambda self: self.delivered)
    @rule(number=NUMBER, why=st.sampled_from(["", "", "", "the request has ended here"]))
    def answer(self, number: int, why: str) -> None:
        """The owner places a chunk or turns it away; late and repeated answers too."""
        link_id, sequence = sorted(self.delivered)[number % len(self.delivered)]
        if link_id in self.links:
            self.tell(tk.Answered(link_id, sequence, why))

    # --- what must hold ----------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        assert set(self.book.open_tickets) == set(self.issued) - self.closed
        assert self.book.staging_bytes() >= 0
        for link_id, link in self.links.items():
            assert self.book.is_live(link_id) != link.ended

    def teardown(self) -> None:
        for link_id in list(self.links):
            while self.links[link_id].receiving:
                self.tell(tk.Received(link_id, self.links[link_id].receiving.pop(0), True))
        for link_id, sequence in sorted(self.delivered):
            if link_id in self.links:
                self.tell(tk.Answered(link_id, sequence, ""))
        for ticket_id in self.issued:
            self.tell(tk.Revoked(ticket_id))
        for link_id, link in self.links.items():
            waiting = [c for c in self.chunks if c[0] == link_id and c not in self.answered]
            assert link.ended or not waiting, f"never answered: {waiting}"
            assert self.book.staging_bytes(link_id) == 0
            self.tell(tk.LinkEnded(link_id, TransferError("the end")))
            self.tell(tk.LinkClosed(link_id))
        assert self.book.num_open_tickets == 0 and self.book.staging_bytes() == 0

    # --- helpers -----------------------------------------------------------------------------------------

    def ticket(self, number: int) -> TicketId:
        recent = list(self.issued)[-4:]
        return recent[number % len(recent)]

    def link(self, number: int) -> str:
        return list(self.links)[number % len(self.links)]

    def take_sequence(self, link_id: str) -> int:
        self.links[link_id].sequence += 1
        return self.links[link_id].sequence - 1


TestBook = Book.TestCase
TestBook.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    derandomize=True,
    phases=(Phase.generate,),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
