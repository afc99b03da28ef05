"""What a scheduler plans and what a step brings back. Pure: the loop turns plans into tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from phasor.core.ids import RequestId
from phasor.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `num_tokens` uncomputed positions of one sequence."""

    seq: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's end, so that a token is sampled."""
        return self.num_tokens == self.seq.num_left


@dataclass(slots=True)
class StepBudget:
    """One step's token budget, thrown away after planning.

    Args:
        left: tokens that may still be scheduled.
    """

    left: int
    chunks: list[ScheduledChunk] = field(default_factory=list)

    def add(self, seq: Sequence) -> bool:
        """Schedule as much of `seq` as fits; False when the budget is spent."""
        if self.left == 0:
            return False
        num_tokens = min(seq.num_left, self.left)
        assert num_tokens > 0, "a sequence with nothing left was scheduled"
        self.chunks.append(ScheduledChunk(seq, num_tokens))
        self.left -= num_tokens
        return True


SampledTokens = dict[RequestId, int]
"""The token sampled for each chunk of a step that reached its sequence's end."""


def advance(
    chunks: list[ScheduledChunk], sampled: SampledTokens
) -> Iterator[tuple[ScheduledChunk, int | None]]:
    """Move each sequence past its computed chunk and append its sampled token.

    Yields:
        each chunk with the token that was sampled for it, or None.
    """
    for chunk in chunks:
        token = sampled[chunk.seq.request_id] if chunk.samples else None
        chunk.seq.num_computed += chunk.num_tokens
        if token is not None:
            chunk.seq.token_ids.append(token)
        yield chunk, token
