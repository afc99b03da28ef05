"""Changes a request makes to the model's logits before a token is chosen: penalties, bias, tokens not allowed yet.

Order: repetition penalty, presence and frequency penalty, bias, then what min_tokens forbids.
Sources: repetition penalty, CTRL, arXiv:1909.05858, section 4.1 (as in transformers: prompt and reply count, negative
logits are multiplied); presence and frequency penalty, OpenAI's API reference (only the reply counts).
"""

from collections.abc import Iterable, Sequence
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


def apply_rules(
    logits: torch.Tensor, draws: Sequence[TokenDraw], eos_token_ids: frozenset[int]
) -> torch.Tensor:
    """Return the logits that tokens are chosen from.

    Args:
        logits: `[n, vocab]` float32; not modified.
        draws: one per row.
        eos_token_ids: the model's end-of-sequence tokens.

    Returns:
        `logits` itself when no row asks for a change, else a changed copy.
    """
    repeated = [i for i, d in enumerate(draws) if d.params.repetition_penalty != 1.0]
    penalised = [
        i
        for i, d in enumerate(draws)
        if d.num_generated and (d.params.presence_penalty != 0.0 or d.params.frequency_penalty != 0.0)
    ]
    biased = [i for i, d in enumerate(draws) if d.params.logit_bias]
    unended = [i for i, d in enumerate(draws) if d.num_generated < d.params.min_tokens]
    if not (repeated or penalised or biased or unended):
        return logits
    changed = logits.clone()
    # One flat index per (row, token): each rule is a few operations for the whole batch.
    flat, vocab_size = changed.view(-1), logits.shape[-1]
    if repeated:
        index, _ = _occurrences(((i, draws[i].token_ids) for i in repeated), flat, vocab_size)
        penalty = _per_row([d.params.repetition_penalty for d in draws], flat)[index // vocab_size]
        old = flat[index]
        flat[index] = torch.where(old > 0, old / penalty, old * penalty)
    if penalised:
        replies = ((i, draws[i].token_ids[draws[i].num_prompt :]) for i in penalised)
        index, counts = _occurrences(replies, flat, vocab_size)
        presence = _per_row([d.params.presence_penalty for d in draws], flat)[index // vocab_size]
        frequency = _per_row([d.params.frequency_penalty for d in draws], flat)[index // vocab_size]
        flat[index] -= presence + frequency * counts
    if biased:
        pairs = [(i * vocab_size + token, bias) for i in biased for token, bias in draws[i].params.logit_bias]
        index = torch.tensor([at for at, _ in pairs], dtype=torch.int64, device=flat.device)
        flat[index] += torch.tensor([bias for _, bias in pairs], dtype=flat.dtype, device=flat.device)
    if unended:
        forbidden = [
            i * vocab_size + token
            for i in unended
            for token in eos_token_ids.union(draws[i].params.stop_token_ids)
        ]
        flat[torch.tensor(forbidden, dtype=torch.int64, device=flat.device)] = float("-inf")
    return changed


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
