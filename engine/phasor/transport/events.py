"""What a PageReceiver tells the owner of its tickets."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from phasor.core.errors import PhasorError
from phasor.core.ids import TicketId
from phasor.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """Verified pages, the next ones of their ticket.

    They may come when the owner has just revoked the ticket: it then answers with any text, or not at all.
    """

    ticket_id: TicketId
    first_block: int
    """Index in the request's block list."""
    pages: torch.Tensor | None
    """`[n, kv_heads, page_elements]` staging, the owner's until it acknowledges; None for no pages."""
    last: pb.LastChunk | None
    """Set on the last chunk."""
    acknowledge: Callable[[str], None]
    """`acknowledge("")` says that the pages are placed; any other text that the ticket is void, and why (no
    TransferFailed follows: the owner knows). Any thread, never blocks; the first call counts."""


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The rest of this ticket's pages will not arrive; the ticket is closed."""

    ticket_id: TicketId
    error: PhasorError


TransferEvent = ChunkArrived | TransferFailed
