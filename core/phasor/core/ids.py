"""Ids that must not be mixed up, and where new ones come from."""

import secrets
from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in one pool. 0 is the null block, which belongs to nobody."""

BlockKey = NewType("BlockKey", bytes)
"""SHA-256 of a block's whole past: identity, tier and every token up to its end (32 bytes)."""

RequestId = NewType("RequestId", str)
"""One client request, the same text in every process and every log line."""

TicketId = NewType("TicketId", str)
"""One transfer of one request's pages to one decode worker. Never reused."""

Incarnation = NewType("Incarnation", str)
"""Drawn when a worker process starts: a restarted worker is another worker."""

NULL_BLOCK = BlockId(0)


def new_request_id() -> RequestId:
    """Draw a request id, unique across processes."""
    return RequestId("req-" + secrets.token_hex(8))


def new_ticket_id() -> TicketId:
    """Draw a ticket id, unique across processes."""
    return TicketId("tkt-" + secrets.token_hex(8))


def new_incarnation() -> Incarnation:
    """Draw an incarnation; call once per worker process."""
    return Incarnation("inc-" + secrets.token_hex(8))
