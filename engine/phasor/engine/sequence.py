"""One sequence on one worker: its tokens, its blocks, and how far they are computed.

    token_ids     [prompt ........................ | generated ...]
    blocks        [0][1][2][3] ...                  block i holds positions i*block_tokens ..
    num_computed   ------------------>|             KV of the positions before it is in the blocks
    num_registered ---------->|                     blocks before it are findable by key (whole, pure)

A step computes some of the positions from `num_computed` on. When it reaches the end of `token_ids`, one token
is sampled and appended. Decoding is therefore the case in which exactly one position is left, and reading again
after a preemption needs no code of its own.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from phasor.core.identity import block_key
from phasor.core.ids import BlockId, BlockKey, RequestId
from phasor.core.request import SamplingParams, TokenLogprobs
from phasor.engine.blocks import BlockPool


@dataclass(slots=True, kw_only=True)
class Sequence:
    """Mutable state of one sequence; owned by the scheduler that made it."""

    request_id: RequestId
    token_ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    tier: float
    arrival: int
    """Counts up per worker: smaller means longer here."""
    namespace: BlockKey
    choice: int = 0
    """Which of the request's replies this is."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of prompt tokens 1 and on (the first has none), if they were asked for; complete once the prompt is read."""
    blocks: list[BlockId] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    """Tokens found in the pool at the last admission."""
    num_registered: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Positions whose KV is not computed yet; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted that are not there yet."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    def extend_keys(self, block_tokens: int) -> None:
        """Compute the keys of whole blocks that have none yet."""
        while (len(self.keys) + 1) * block_tokens <= len(self.token_ids):
            start = len(self.keys) * block_tokens
            parent = self.keys[-1] if self.keys else self.namespace
            self.keys.append(block_key(parent, self.token_ids[start : start + block_tokens]))

    def num_blocks_missing(self, num_tokens: int, block_tokens: int) -> int:
        """Return how many blocks must be added to hold `num_tokens` tokens."""
        return max(0, -(-num_tokens // block_tokens) - len(self.blocks))


def attach_prefix(seq: Sequence, pool: BlockPool) -> None:
    """Share the longest prefix of `seq` that the pool knows; at least the last token stays to be computed.

    The last token must be computed again even on a full hit, because its logits are needed (and are not kept); so
    must the whole prompt when log-probabilities of its tokens are wanted.
    """
    assert not seq.blocks and seq.num_computed == 0
    seq.extend_keys(pool.block_tokens)
    usable = 0 if seq.lacks_prompt_logprobs else (seq.num_tokens - 1) // pool.block_tokens
    found = pool.match(seq.keys[:usable], seq.token_ids)
    pool.share(found)
    seq.blocks = found
    seq.num_computed = seq.num_cached = len(found) * pool.block_tokens
    seq.num_registered = len(found)


def register_computed(seq: Sequence, pool: BlockPool) -> None:
    """Make every block that became whole findable by its key."""
    seq.extend_keys(pool.block_tokens)
    num_whole = seq.num_computed // pool.block_tokens
    for index in range(seq.num_registered, num_whole):
        start = index * pool.block_tokens
        pool.register(seq.blocks[index], seq.keys[index], seq.token_ids[start : start + pool.block_tokens])
    seq.num_registered = max(seq.num_registered, num_whole)


def fork_sequence(
    seq: Sequence, choice: int, first_token: int, own_block: BlockId | None, pool: BlockPool
) -> Sequence:
    """Make another reply's sequence out of one that has just read its prompt.

    Args:
        seq: holds the prompt's blocks, all computed.
        choice: which reply the new sequence is.
        first_token: the new reply's first token.
        own_block: taken for the copy of the prompt's partial last block, which the new sequence owns from now on; None
            if the prompt ends at a block's edge. The caller copies the bytes.
        pool: where both hold blocks.

    Returns:
        a sequence that shares the prompt's whole blocks (one reference each is taken).
    """
    assert seq.num_computed == seq.num_prompt, "a fork before the prompt was read"
    num_whole = seq.num_prompt // pool.block_tokens
    assert (own_block is None) == (seq.num_prompt % pool.block_tokens == 0)
    shared = seq.blocks[:num_whole]
    pool.share(shared)
    return Sequence(
        request_id=seq.request_id,
        token_ids=[*seq.token_ids[: seq.num_prompt], first_token],
        num_prompt=seq.num_prompt,
        sampling=seq.sampling.for_choice(choice),
        tier=seq.tier,
        arrival=seq.arrival,
        namespace=seq.namespace,
        choice=choice,
        prompt_logprobs=seq.prompt_logprobs,
        blocks=[*shared, *([] if own_block is None else [own_block])],
        keys=seq.keys[:num_whole],
        num_computed=seq.num_prompt,
        num_registered=num_whole,
    )


def release_blocks(seq: Sequence, pool: BlockPool) -> None:
    """Give back every block; idempotent. The one place where a sequence's blocks are freed."""
    blocks, seq.blocks = seq.blocks, []
    seq.num_computed = seq.num_cached = seq.num_registered = 0
    if seq.lacks_prompt_logprobs:
        seq.prompt_logprobs.clear()  # read again from the start
    pool.free_blocks(blocks)


def grow_blocks(seq: Sequence, num_tokens: int, pool: BlockPool) -> bool:
    """Add blocks until `num_tokens` tokens fit; False (and no change) when the pool has too few."""
    missing = seq.num_blocks_missing(num_tokens, pool.block_tokens)
    if missing > pool.num_free:
        return False
    seq.blocks.extend(pool.allocate(missing))
    return True


def blocks_spanned(blocks: Seq[BlockId], first: int, count: int) -> list[BlockId]:
    """Return blocks `first` .. `first + count - 1` of a sequence's list, which must exist."""
    assert first >= 0 and first + count <= len(blocks), f"blocks {first}+{count} of {len(blocks)}"
    return list(blocks[first : first + count])
