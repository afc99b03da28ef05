"""What the client hands out: plain frozen data, no messages of the wire."""

from dataclasses import dataclass, field
from enum import StrEnum

from phasor.core.identity import Identity
from phasor.core.request import ChoiceEnd, FinishReason, Timing, TokenLogprobs, Usage

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""Where `phasor serve` listens unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """"system", "user" or "assistant"; what a model's template takes."""
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt, if it was asked for; comes before the first Delta."""

    text: str
    """With echo."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One per token, if asked for; None for the first, which nothing predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of a reply."""

    text: str
    """May be empty while a character or a stop string is undecided."""
    token_ids: tuple[int, ...]
    """Every generated token stands in exactly one Delta."""
    index: int = 0
    """Which of n replies."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a reply; always its last event."""

    finish_reason: FinishReason
    stop_string: str = ""
    """The stop string that ended it, if one did."""
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    rope_tier: float = 1.0
    prefill_worker: str = ""
    """Incarnation; empty when the decode worker read the prompt itself."""
    decode_worker: str = ""
    choices: tuple[ChoiceEnd, ...] = ()
    """How each of n replies ended; `finish_reason` and `stop_string` are reply 0's."""


Event = Prompt | Delta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of n whole replies."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One per token, if asked for."""
    end: ChoiceEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole reply; `text` and `token_ids` are reply 0's."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    choices: tuple[Choice, ...] = ()
    """All n replies."""
    prompt: Prompt | None = None
    """If it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """One served model."""

    name: str
    max_model_len: int
    """Longest prompt plus reply, in tokens."""
    dtype: str
    weights_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """How the model turns positions into angles."""

    scheme: str
    theta: float
    rotary_dim: int
    trained_positions: int
    max_positions: int
    fingerprint: str


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNKNOWN = "unknown"
    """The server is newer than this client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a worker holds now, and what it has done since it started (`*_total`)."""

    num_blocks: int = 0
    num_free_blocks: int = 0
    """Free or cached: allocatable now."""
    num_cached_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_open_tickets: int = 0
    staging_bytes: int = 0
    prompt_tokens_computed_total: int = 0
    prompt_tokens_reused_total: int = 0
    tokens_generated_total: int = 0
    tokens_transferred_total: int = 0
    bytes_transferred_total: int = 0
    num_leaked_blocks: int = 0
    num_preemptions_total: int = 0
    num_transfer_failures_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker as the router sees it."""

    role: Role
    address: str
    incarnation: str
    healthy: bool
    counts: Counts
    metrics_address: str = ""
    """host:port where Prometheus reads it; empty: nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says of itself."""

    version: str
    model: ModelCard
    identity: Identity
    rope: Rope
    workers: tuple[Worker, ...]
    metrics_address: str = ""
    """host:port where Prometheus reads the router; empty: nowhere."""
