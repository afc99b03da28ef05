"""One request inside Phasor, after validation: what to sample, when to stop, what it used.

Plain data. Validation against a model's limits lives in `phasor.router.validation`.
"""

import enum
from dataclasses import dataclass, field


class FinishReason(enum.StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    """A stop string, a stop token or the end-of-sequence token."""
    LENGTH = "length"
    """max_tokens tokens were made, or the model's limit was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Every value is already validated."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p."""
    seed: int = 0
    """Always set (the router draws one if the client gave none): a token depends on seed and position only,
    so a request that is replayed elsewhere continues identically."""
    max_tokens: int = 16
    """At most this many new tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the reply; never part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the reply; counted, not shown."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(slots=True, kw_only=True)
class Usage:
    """Tokens of one request, by where they came from."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in a pool instead of computed."""
    prefill_computed_tokens: int = 0
    """Prompt tokens computed on the prefill worker."""
    decode_computed_tokens: int = 0
    """Prompt tokens computed on the decode worker (local prefill; reading again after a preemption)."""
    transferred_tokens: int = 0
    """Prompt tokens whose pages crossed a link."""
    transferred_bytes: int = 0
    num_preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class Timing:
    """Where the time to the first token went, in seconds."""

    queue_s: float = 0.0
    """From arrival at the router until the prefill worker began computing."""
    prefill_s: float = 0.0
    """From the first chunk's start to the last chunk's end."""
    transfer_s: float = 0.0
    """From the last chunk's end until the decode worker held all pages: the exposed part of the hand-over."""
    first_token_s: float = 0.0
    """From arrival at the router until the first token left it."""
    total_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class FinishedReply:
    """The end of a reply."""

    reason: FinishReason
    stop_string: str = ""
    """The stop string that ended it, if one did."""
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    rope_tier: float = 1.0
