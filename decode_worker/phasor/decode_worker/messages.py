"""What the decode scheduler is told (events) and what it asks for (instructions). Plain data.

`pages` and `acknowledge` are carried through the scheduler unopened: it stays free of tensors and threads.
"""

from dataclasses import dataclass

from phasor.core.errors import PhasorError
from phasor.core.ids import BlockId, RequestId
from phasor.core.request import FinishReason, SampledToken, SamplingParams, Timing, TokenLogprobs, Usage


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
    first_tokens: tuple[SampledToken, ...] = ()
    """On the last chunk: one per reply."""
    num_tokens: int = 0
    """On the last chunk: the sender's idea of the prompt's length."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """On the last chunk, if asked for: of the prompt's tokens but the first."""


@dataclass(frozen=True, slots=True)
class TransferBroken:
    """The pages of this request will not arrive."""

    request_id: RequestId
    error: PhasorError


@dataclass(frozen=True, slots=True)
class Released:
    """A request, or one reply of it, needs nothing here any more, whatever the reason. Unknown ones are ignored."""

    request_id: RequestId
    choice: int | None = None
    """None: all of them."""


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
class CopyBlock:
    """Copy a block's bytes: a reply gets its own partial last block of the prompt before it writes to it."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class RejectPages:
    """Answer the sender that its pages are not wanted; staging is dropped."""

    acknowledge: object
    why: str


@dataclass(frozen=True, slots=True)
class RevokeTicket:
    """No more pages may be delivered for this request."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitToken:
    """A token was made; `finish` is set on the last one of a reply. Usage and timing are as of this token."""

    request_id: RequestId
    choice: int
    token: SampledToken
    finish: FinishReason | None
    usage: Usage
    timing: Timing
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the request's first token, if asked for."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends here with an error; everything it held is released already."""

    request_id: RequestId
    error: PhasorError


Instruction = Admit | PlacePages | CopyBlock | RejectPages | RevokeTicket | EmitToken | Fail
