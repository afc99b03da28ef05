"""Announcements that reach the ticket book after their link has ended: nobody waits for such a ticket's deadline."""

import pytest

from phasor.core.errors import TransferError
from phasor.core.ids import Incarnation, TicketId
from phasor.transport import tickets as tk

TICKET = TicketId("tkt-a")


def announced(link_id: str, sequence: int = 0) -> tk.Announced:
    return tk.Announced(link_id, sequence, TICKET, 0, 2, (2,), 20, True)


@pytest.fixture
def book() -> tk.TicketBook:
    book = tk.TicketBook(max_chunk_bytes=1000)
    book.handle(tk.Issued(TICKET, 0, 2))
    book.handle(tk.LinkOpened("old", Incarnation("inc-p")))
    return book


@pytest.mark.parametrize("is_closed", [False, True])
def test_ticket_that_only_the_ended_link_asked_for_fails_once(book: tk.TicketBook, is_closed: bool) -> None:
    book.handle(tk.LinkEnded("old", TransferError("broke")))
    if is_closed:
        book.handle(tk.LinkClosed("old"))
    (closed,) = book.handle(announced("old"))
    assert isinstance(closed, tk.CloseTicket)
    assert closed.ticket_id == TICKET and isinstance(closed.error, TransferError)
    assert book.handle(announced("old", 1)) == []
    assert (book.num_open_tickets, book.staging_bytes()) == (0, 0)


def test_ticket_that_another_link_has_begun_is_left_alone(book: tk.TicketBook) -> None:
    book.handle(tk.LinkOpened("new", Incarnation("inc-p")))
    book.handle(announced("new"))
    assert book.handle(announced("old")) == []
    assert book.is_open(TICKET)
