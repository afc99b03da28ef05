"""Choosing tokens from logits, so that a token depends on its request's seed and its position only.

One uniform number per (seed, position), from a hash instead of a generator's state: the same in every process, in
any batch, after any restart. The token is the inverse of the cumulative distribution at that number.
"""

import hashlib
import struct
from collections.abc import Sequence

import torch

from phasor.core.request import SamplingParams


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that is a pure function of seed and position (53 random bits)."""
    counter = struct.pack("<QQ", seed & (2**64 - 1), position)
    digest = hashlib.blake2b(counter, digest_size=8, person=b"phasor-u").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Choose one token per row.

    Args:
        logits: `[n, vocab]` float32; not modified.
        params: one per row.
        positions: the position that each chosen token will have.

    Returns:
        one token id per row; row i does not depend on the other rows.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    rows = [i for i, p in enumerate(params) if not p.greedy]
    if rows:
        drawn = _draw(logits[rows], [params[i] for i in rows], [positions[i] for i in rows])
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    device, vocab_size = logits.device, logits.shape[-1]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    # Sorted by falling logit, ties by rising id, so that "the first k" is well defined.
    ordered, ids = torch.sort(logits / temperature[:, None], dim=-1, descending=True, stable=True)
    top_k = torch.tensor([p.top_k or vocab_size for p in params], device=device)
    ranks = torch.arange(vocab_size, device=device)
    ordered = ordered.masked_fill(ranks[None, :] >= top_k[:, None], float("-inf"))
    # float64: the cumulative sum of 50,000 float32 probabilities is off by more than many a tail's mass.
    probs = ordered.double().softmax(-1)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    before = probs.cumsum(-1) - probs
    # A token is kept while the mass before it is short of top_p; the likeliest always is.
    probs = probs.masked_fill((before >= top_p[:, None]) & (ranks[None, :] > 0), 0.0)
    cumulative = probs.cumsum(-1)
    u = torch.tensor(
        [uniform(p.seed, n) for p, n in zip(params, positions, strict=True)], dtype=torch.float64
    )
    target = u.to(device)[:, None] * cumulative[:, -1:]
    index = (cumulative <= target).sum(-1, keepdim=True).clamp(max=vocab_size - 1)
    # Rounding may land on a token that was cut: step back to the last one that was kept.
    last = (probs > 0).long().cumsum(-1).argmax(-1, keepdim=True)
    chosen: list[int] = ids.gather(-1, torch.minimum(index, last))[:, 0].tolist()
    return chosen
