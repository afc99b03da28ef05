"""What a scheduler plans and what a step brings back. Pure: the loop turns plans into tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from phasor.core.request import SampledToken, TokenLogprobs
from phasor.engine.sequence import Sequence as TokenSequence

MAX_SCORED_TOKENS = 256
"""A step computes the logits of at most so many prompt tokens: each takes a row of the vocabulary's length (256 rows of
150,000 take 150 MB), and how many there are is the client's choice."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `num_tokens` uncomputed positions of one sequence."""

    seq: TokenSequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's end, so that a token is sampled."""
        return self.num_tokens == self.seq.num_left

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of prompt tokens are wanted from this chunk."""
        return self.seq.lacks_prompt_logprobs


@dataclass(slots=True)
class StepBudget:
    """One step's token budget, thrown away after planning.

    Args:
        left: tokens that may still be scheduled.
        scored_left: of these, tokens of prompts whose log-probabilities are wanted.
    """

    left: int
    scored_left: int = MAX_SCORED_TOKENS
    chunks: list[ScheduledChunk] = field(default_factory=list)

    def add(self, seq: TokenSequence) -> bool:
        """Schedule as much of `seq` as fits, perhaps nothing; False when the budget is spent."""
        if self.left == 0:
            return False
        num_tokens = min(seq.num_left, self.left)
        if seq.lacks_prompt_logprobs:
            num_tokens = min(num_tokens, self.scored_left)
            if num_tokens == 0:
                return True
            self.scored_left -= num_tokens
        assert num_tokens > 0, "a sequence with nothing left was scheduled"
        self.chunks.append(ScheduledChunk(seq, num_tokens))
        self.left -= num_tokens
        return True


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What computing one chunk brought."""

    tokens: tuple[SampledToken, ...] = ()
    """The sampled token, one per reply that the sequence stands for; empty if its end was not reached."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens behind the chunk's positions, if they were wanted."""


def advance(
    chunks: Sequence[ScheduledChunk], results: Sequence[ChunkResult]
) -> Iterator[tuple[ScheduledChunk, ChunkResult]]:
    """Move each sequence past its computed chunk and append its (first) sampled token.

    Yields:
        each chunk with its result.
    """
    for chunk, result in zip(chunks, results, strict=True):
        assert bool(result.tokens) == chunk.samples, "a token where none was due, or none where one was"
        chunk.seq.num_computed += chunk.num_tokens
        chunk.seq.prompt_logprobs.extend(result.prompt_logprobs)
        if result.tokens:
            chunk.seq.token_ids.append(result.tokens[0].token_id)
        yield chunk, result
