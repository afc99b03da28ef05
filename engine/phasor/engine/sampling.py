"""Choosing tokens from logits, so that a token depends on its request's seed and its position only.

One uniform number per (seed, position), from a hash instead of a generator's state: the same in every process, in
any batch, after any restart. The token is the inverse of a cumulative distribution at that number.

Cuts are made in transformers' order: top_k, then top_p of what is left, then min_p.
"""

import hashlib
import struct
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from phasor.core.request import SampledToken, SamplingParams
from phasor.engine.logit_rules import TokenDraw, apply_rules
from phasor.engine.logprobs import likeliest_tokens, token_logprobs

_RUN = 256
"""Tokens whose weights are summed at once where tokens are not sorted."""
_NUCLEUS = 256
"""Likeliest tokens that are sorted for top_p at first; more are where these do not reach it."""


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that is a pure function of seed and position (53 random bits)."""
    counter = struct.pack("<QQ", seed & (2**64 - 1), position)
    digest = hashlib.blake2b(counter, digest_size=8, person=b"phasor-u").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor, draws: Sequence[TokenDraw], eos_token_ids: frozenset[int] = frozenset()
) -> list[SampledToken]:
    """Choose one token per row.

    Args:
        logits: `[n, vocab]` float32; not modified.
        draws: one per row.
        eos_token_ids: tokens that min_tokens forbids, besides a request's own stop tokens.

    Returns:
        one token per row, with log-probabilities where they are wanted; row i does not depend on the other rows.
    """
    allowed = apply_rules(logits, draws, eos_token_ids)
    tokens = _choose(allowed, draws)
    scored = [i for i, d in enumerate(draws) if d.params.logprobs is not None]
    if not scored:
        return [SampledToken(token) for token in tokens]
    rows = logits if len(scored) == len(draws) else logits[scored]
    num_top = [draws[i].params.logprobs or 0 for i in scored]
    found = dict(zip(scored, token_logprobs(rows, [tokens[i] for i in scored], num_top), strict=True))
    return [SampledToken(token, found.get(i)) for i, token in enumerate(tokens)]


def _choose(logits: torch.Tensor, draws: Sequence[TokenDraw]) -> list[int]:
    """Greedy rows take the likeliest token; the rest are drawn together with rows that need the same sorting."""
    groups: dict[int, list[int]] = {}
    for row, draw in enumerate(draws):
        groups.setdefault(_num_sorted(draw.params, logits.shape[-1]), []).append(row)
    tokens = [0] * len(draws)
    for num_sorted, rows in groups.items():
        part = logits if len(rows) == len(draws) else logits[rows]
        if num_sorted < 0:
            chosen = part.argmax(dim=-1).tolist()
        else:
            params = [draws[i].params for i in rows]
            numbers = [uniform(draws[i].params.seed, len(draws[i].token_ids)) for i in rows]
            chosen = _draw(part, params, numbers, num_sorted)
        for row, token in zip(rows, chosen, strict=True):
            tokens[row] = token
    return tokens


def _num_sorted(params: SamplingParams, vocab_size: int) -> int:
    """Return how many of the likeliest tokens must be sorted for a row: -1 none (greedy), 0 none (no cut by rank)."""
    if params.greedy:
        return -1
    if params.top_k:
        # Powers of two, so that rows share a group, and a row's result does not depend on its company.
        return int(min(vocab_size, max(64, 1 << (params.top_k - 1).bit_length())))
    return min(vocab_size, _NUCLEUS) if params.top_p < 1.0 else 0


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float], num_sorted: int
) -> list[int]:
    # Passes over [n, vocab] are what this costs: few of them, in place, and no masks where none are needed.
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=logits.device)
    top = logits.amax(-1, keepdim=True)
    u = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=logits.device)
    if num_sorted == 0:
        weights = (logits - top).div_(temperature[:, None]).exp_()
        return _draw_by_id(weights, min_p, u)
    top_k = torch.tensor([p.top_k for p in params], dtype=torch.int64, device=logits.device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=logits.device)
    values, ids = likeliest_tokens(logits, num_sorted)
    weights = (values - top).div_(temperature[:, None]).double().exp_()
    weights = weights.masked_fill_(_ranks(weights) >= torch.where(top_k > 0, top_k, num_sorted)[:, None], 0.0)
    totals = weights.sum(-1)
    if not all(p.top_k for p in params):
        everything = (logits - top).div_(temperature[:, None]).exp_().sum(-1).double()
        short = ((totals < top_p * everything) & (top_k == 0)).nonzero()[:, 0].tolist()
        totals = torch.where(top_k > 0, totals, everything)
        if short and num_sorted < logits.shape[-1]:
            tokens = _draw_by_rank(weights, ids, top_p * totals, min_p, u)
            rest = [params[row] for row in short]
            again = _draw(
                logits[short], rest, [numbers[row] for row in short], min(16 * num_sorted, logits.shape[-1])
            )
            for row, token in zip(short, again, strict=True):
                tokens[row] = token
            return tokens
    return _draw_by_rank(weights, ids, top_p * totals, min_p, u)


def _draw_by_id(weights: torch.Tensor, min_p: torch.Tensor, u: torch.Tensor) -> list[int]:
    """Draw from all tokens, in order of id: sums of runs first, then inside one run. The likeliest weighs 1."""
    num_rows, vocab_size = weights.shape
    if bool((min_p > 0).any()):
        weights = weights * (weights >= min_p[:, None])
    if vocab_size % _RUN:
        weights = F.pad(weights, (0, -vocab_size % _RUN))
    runs = weights.view(num_rows, -1, _RUN)
    # float64: a running sum of 50,000 float32 weights is off by more than many a tail's mass.
    sums = runs.sum(-1).double()
    ends = sums.cumsum(-1)
    target = u[:, None] * ends[:, -1:]
    # Rounding may reach the very end: step back to the last run, and in it the last token, that has any weight.
    run = torch.minimum((ends <= target).sum(-1), _last_positive(sums))
    each = torch.arange(num_rows, device=weights.device)
    inside = runs[each, run].double()
    before = (ends - sums)[each, run]
    index = ((inside.cumsum(-1) + before[:, None]) <= target).sum(-1)
    index = torch.minimum(index, _last_positive(inside))
    chosen: list[int] = (run * _RUN + index).tolist()
    return chosen


def _draw_by_rank(
    weights: torch.Tensor, ids: torch.Tensor, reached: torch.Tensor, min_p: torch.Tensor, u: torch.Tensor
) -> list[int]:
    """Draw from `[n, m]` float64 weights of the likeliest tokens, until whose sum reaches `reached` they are kept."""
    cumulative = weights.cumsum(-1)
    # A token is kept while the mass before it is short of top_p; the likeliest always is.
    cut = ((cumulative - weights) >= reached[:, None]) & (_ranks(weights) > 0)
    weights = weights.masked_fill(cut | (weights < min_p[:, None]), 0.0)
    cumulative = weights.cumsum(-1)
    index = (cumulative <= u[:, None] * cumulative[:, -1:]).sum(-1)
    index = torch.minimum(index, _last_positive(weights))
    chosen: list[int] = ids.gather(-1, index[:, None])[:, 0].tolist()
    return chosen


def _ranks(weights: torch.Tensor) -> torch.Tensor:
    return torch.arange(weights.shape[-1], device=weights.device)[None, :]


def _last_positive(weights: torch.Tensor) -> torch.Tensor:
    """Return the index of the last positive weight of each row."""
    return (weights > 0).long().cumsum(-1).argmax(-1)
