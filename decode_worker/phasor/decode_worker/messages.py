"""What the decode scheduler is told (events) and what it asks for (instructions). Plain data.

`pages` and `acknowledge` are carried through the scheduler unopened: it stays free of tensors and threads.
"""

from dataclasses import dataclass

from phasor.core.errors import PhasorError
from phasor.core.ids import BlockId, RequestId
from phasor.core.request import FinishReason, SamplingParams, Timing, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request to serve."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    tier: float
    local_prefill: bool
    """Read the prompt here instead of waiting for pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkArrived:
    """Verified pages lie in a staging buffer."""

    request_id: RequestId
    first_block: int
    num_blocks: int
    pages: object
    """The staging tensor, or None when `num_blocks` is 0."""
    acknowledge: object
    """A callable that answers the sender; called once, by whoever carries out the instruction."""
    first_token: int | None = None
    """Set on the last chunk."""
    num_tokens: int = 0
    """On the last chunk: the sender's idea of the prompt's length."""


@dataclass(frozen=True, slots=True)
class TransferBroken:
    """The pages of this request will not arrive."""

    request_id: RequestId
    error: PhasorError


@dataclass(frozen=True, slots=True)
class Released:
    """The request needs nothing here any more, whatever the reason. Unknown requests are ignored."""

    request_id: RequestId


Event = Arrived | ChunkArrived | TransferBroken | Released


@dataclass(frozen=True, slots=True)
class TicketGrant:
    """Blocks of a request that are reserved and must be filled by a prefill worker."""

    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Tell the router that the request has its blocks."""

    request_id: RequestId
    cached_tokens: int
    grant: TicketGrant | None
    """None when the prompt is read here."""


@dataclass(frozen=True, slots=True)
class PlacePages:
    """Copy staged pages into blocks, then acknowledge them."""

    blocks: list[BlockId]
    pages: object
    acknowledge: object


@dataclass(frozen=True, slots=True)
class RejectPages:
    """Answer the sender that its pages are not wanted; staging is dropped."""

    acknowledge: object
    why: str


@dataclass(frozen=True, slots=True)
class RevokeTicket:
    """No more pages may be delivered for this request."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class EmitToken:
    """A token was made; `finish` is set on the last one. Usage and timing are as of this token."""

    request_id: RequestId
    token: int
    finish: FinishReason | None
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends here with an error; everything it held is released already."""

    request_id: RequestId
    error: PhasorError


Instruction = Admit | PlacePages | RejectPages | RevokeTicket | EmitToken | Fail
