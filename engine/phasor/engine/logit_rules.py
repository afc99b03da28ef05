"""Changes a request makes to the model's logits before a token is chosen: penalties, bias, tokens not allowed yet.

Order: repetition penalty, presence and frequency penalty, bias, then what min_tokens forbids.
Sources: repetition penalty, CTRL, arXiv:1909.05858, section 4.1 (as in transformers: prompt and reply count, negative
logits are multiplied); presence and frequency penalty, OpenAI's API reference (only the reply counts).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch

from phasor.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """One token to choose, and all that the choice depends on besides the logits."""

    params: SamplingParams
    token_ids: Sequence[int]
    """Prompt and reply so far; the chosen token's position is its length."""
    num_prompt: int

    @property
    def num_generated(self) -> int:
        """Tokens of the reply so far."""
        return len(self.token_ids) - self.num_prompt


@contextmanager
def rules_applied(
    logits: torch.Tensor, draws: Sequence[TokenDraw], eos_token_ids: frozenset[int]
) -> Iterator[None]:
    """Change logits to those that tokens are chosen from; put back the model's own at the end of the block.

    In place, because the rules touch few of the logits and a copy of all costs more than the rules do.

    Args:
        logits: `[n, vocab]` float32, contiguous.
        draws: one per row.
        eos_token_ids: the model's end-of-sequence tokens.
    """
    # One flat index per (row, token): each rule is a few operations for the whole batch.
    flat = logits.view(-1)
    undo: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for index, changed in _changes(flat, logits.shape[-1], draws, eos_token_ids):
            undo.append((index, flat[index]))
            flat[index] = changed
        yield
    finally:
        for index, own in reversed(undo):
            flat[index] = own


def _changes(
    flat: torch.Tensor, vocab_size: int, draws: Sequence[TokenDraw], eos_token_ids: frozenset[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for each rule that some row asks for the flat indices of what it changes, each once, and the new logits."""
    repeated = [i for i, d in enumerate(draws) if d.params.repetition_penalty != 1.0]
    penalised = [
        i
        for i, d in enumerate(draws)
        if d.num_generated and (d.params.presence_penalty != 0.0 or d.params.frequency_penalty != 0.0)
    ]
    biased = [i for i, d in enumerate(draws) if d.params.logit_bias]
    unended = [i for i, d in enumerate(draws) if d.num_generated < d.params.min_tokens]
    if repeated:
        index, _ = _occurrences(((i, draws[i].token_ids) for i in repeated), flat, vocab_size)
        penalty = _per_row([d.params.repetition_penalty for d in draws], flat)[index // vocab_size]
        old = flat[index]
        yield index, torch.where(old > 0, old / penalty, old * penalty)
    if penalised:
        replies = ((i, draws[i].token_ids[draws[i].num_prompt :]) for i in penalised)
        index, counts = _occurrences(replies, flat, vocab_size)
        presence = _per_row([d.params.presence_penalty for d in draws], flat)[index // vocab_size]
        frequency = _per_row([d.params.frequency_penalty for d in draws], flat)[index // vocab_size]
        yield index, flat[index] - (presence + frequency * counts)
    if biased:
        pairs = [(i * vocab_size + token, bias) for i in biased for token, bias in draws[i].params.logit_bias]
        index = torch.tensor([at for at, _ in pairs], dtype=torch.int64, device=flat.device)
        bias = torch.tensor([bias for _, bias in pairs], dtype=flat.dtype, device=flat.device)
        yield index, flat[index] + bias
    forbidden = [
        i * vocab_size + token
        for i in unended
        for token in eos_token_ids.union(draws[i].params.stop_token_ids)
    ]
    if forbidden:
        index = torch.tensor(forbidden, dtype=torch.int64, device=flat.device)
        yield index, torch.full_like(index, float("-inf"), dtype=flat.dtype)


def _occurrences(
    rows: Iterable[tuple[int, Sequence[int]]], flat: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flat indices of the tokens that occur in each row, and how often each does."""
    parts = [(row, tokens) for row, tokens in rows]
    tokens = torch.tensor(list(chain.from_iterable(tokens for _, tokens in parts)), dtype=torch.int64)
    offsets = torch.tensor([row * vocab_size for row, _ in parts], dtype=torch.int64)
    lengths = torch.tensor([len(tokens) for _, tokens in parts], dtype=torch.int64)
    index, counts = torch.unique(tokens + torch.repeat_interleave(offsets, lengths), return_counts=True)
    return index.to(flat.device), counts.to(flat.device)


def _per_row(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)
