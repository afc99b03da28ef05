"""One request inside Phasor, after validation: what to sample, when to stop, what it used.

Plain data. Validation against a model's limits lives in `phasor.router.validation`.
"""

import enum
import hashlib
import struct
from dataclasses import dataclass, field, replace

MIN_TEMPERATURE = 1e-5
"""Below it the likeliest token is taken: dividing float32 logits by less overflows."""


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
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the reply contains."""
    frequency_penalty: float = 0.0
    """Taken off as often as the reply contains the token."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that prompt or reply contain."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    min_tokens: int = 0
    """Nothing but the limits ends a reply before it has that many tokens."""
    logprobs: int | None = None
    """Report each token's log-probability and those of so many likeliest; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    num_choices: int = 1
    """Replies to make from one prompt."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < MIN_TEMPERATURE

    def for_choice(self, index: int) -> "SamplingParams":
        """Return what one of several replies is sampled with: reply 0 is the one that a single one would be."""
        if index == 0 and self.num_choices == 1:
            return self
        return replace(self, seed=choice_seed(self.seed, index), num_choices=1)


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of reply `index`: a pure function, so that any worker derives the same."""
    if index == 0:
        return seed
    packed = struct.pack("<QQ", seed & (2**64 - 1), index)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"phasor-c").digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's natural log-probability under the model's own distribution (before temperature and penalties)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest tokens, likeliest first."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token, with its log-probabilities if they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """How one reply ended."""

    index: int
    reason: FinishReason
    stop_string: str = ""
    completion_tokens: int = 0


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
    """The end of a request's replies."""

    choices: tuple[ChoiceEnd, ...]
    """One per reply, in order of index."""
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    rope_tier: float = 1.0
