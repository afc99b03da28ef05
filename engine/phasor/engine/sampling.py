"""Choosing tokens from logits, so that a token depends on its request's seed and its position only.

Uniform numbers are a hash of (seed, position, attempt) instead of a generator's state: the same in every process, in
any batch, after any restart.

Cuts are made in transformers' order: top_k, then top_p of what is left, then min_p. With top_k the likeliest tokens are
sorted and the token is the inverse of what is left of their cumulative distribution. Without it nothing is sorted: a
token is drawn from all, in order of id, and drawn again while the cuts do not keep it, which gives each kept token its
share of what is kept. Asking whether top_p keeps one token takes one sum; finding all that it keeps takes a sort.
"""

import hashlib
import struct
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from phasor.core.request import SampledToken, SamplingParams
from phasor.engine.logit_rules import TokenDraw, rules_applied
from phasor.engine.logprobs import likeliest_token, likeliest_tokens, token_logprobs

_RUN = 256
"""Tokens whose weights are summed at once where tokens are not sorted."""
_NUCLEUS = 64
"""Likeliest tokens that are sorted at first where top_p may keep few; more are where these do not reach it."""
_DRAWN_TOP_P = 0.5
"""From this top_p on tokens are drawn until one is kept: at least so many are. Below it they are sorted."""
_MAX_ATTEMPTS = 12
"""Draws without a kept token after which tokens are sorted after all."""


def uniform(seed: int, position: int, attempt: int = 0) -> float:
    """Return a number in [0, 1) that is a pure function of its arguments (53 random bits)."""
    counter = struct.pack("<QQ", seed & (2**64 - 1), position)
    if attempt:
        counter += struct.pack("<Q", attempt)
    digest = hashlib.blake2b(counter, digest_size=8, person=b"phasor-u").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


@torch.inference_mode()
def sample(
    logits: torch.Tensor, draws: Sequence[TokenDraw], eos_token_ids: frozenset[int] = frozenset()
) -> list[SampledToken]:
    """Choose one token per row.

    Args:
        logits: `[n, vocab]` float32, contiguous; changed while this runs, and left as they were.
        draws: one per row.
        eos_token_ids: tokens that min_tokens forbids, besides a request's own stop tokens.

    Returns:
        one token per row, with log-probabilities where they are wanted; row i does not depend on the other rows.
    """
    with rules_applied(logits, draws, eos_token_ids):
        tokens = _choose(logits, draws)
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
            chosen = likeliest_token(part)
        elif num_sorted == 0:
            chosen = _draw_by_id(part, [draws[i] for i in rows])
        else:
            chosen = _draw_by_rank(part, [draws[i] for i in rows], num_sorted)
        for row, token in zip(rows, chosen, strict=True):
            tokens[row] = token
    return tokens


def _num_sorted(params: SamplingParams, vocab_size: int) -> int:
    """Return how many of the likeliest tokens to sort for a row: -1 none (greedy), 0 none (drawn until kept)."""
    if params.greedy:
        return -1
    if params.top_k:
        # Powers of two, so that rows share a group, and a row's result does not depend on its company.
        return int(min(vocab_size, max(64, 1 << (params.top_k - 1).bit_length())))
    return min(vocab_size, _NUCLEUS) if params.top_p < _DRAWN_TOP_P else 0


def _draw_by_id(logits: torch.Tensor, draws: Sequence[TokenDraw]) -> list[int]:
    """Draw from all tokens until the cuts keep one."""
    weights = _weights(logits, logits.amax(-1, keepdim=True), draws)
    vocab_size = weights.shape[-1]
    padded = F.pad(weights, (0, -vocab_size % _RUN)) if vocab_size % _RUN else weights
    runs = padded.view(len(draws), -1, _RUN)
    # float64: a running sum of 50,000 float32 weights is off by more than many a tail's mass.
    sums = runs.sum(-1).double()
    ends = sums.cumsum(-1)
    tokens = [0] * len(draws)
    pending = list(range(len(draws)))
    for attempt in range(_MAX_ATTEMPTS):
        rows = torch.tensor(pending, device=logits.device)
        chosen = _inverse_by_id(
            runs, sums, ends, rows, _numbers([draws[i] for i in pending], attempt, logits)
        )
        kept = _are_kept(runs, ends[rows, -1], rows, chosen, [draws[i].params for i in pending])
        for row, token, is_kept in zip(pending, chosen.tolist(), kept, strict=True):
            if is_kept:
                tokens[row] = token
        pending = [row for row, is_kept in zip(pending, kept, strict=True) if not is_kept]
        if not pending:
            return tokens
    num_sorted = min(vocab_size, _NUCLEUS)
    rest = _draw_by_rank(logits[pending], [draws[i] for i in pending], num_sorted, attempt=_MAX_ATTEMPTS)
    for row, token in zip(pending, rest, strict=True):
        tokens[row] = token
    return tokens


def _inverse_by_id(
    runs: torch.Tensor, sums: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """Return one token per row at `u` of the cumulative distribution in order of id: first the run, then inside it."""
    target = u[:, None] * ends[rows, -1:]
    # Rounding may reach the very end: step back to the last run, and in it the last token, that has any weight.
    run = torch.minimum((ends[rows] <= target).sum(-1), _last_positive(sums[rows]))
    inside = runs[rows, run].double()
    before = (ends - sums)[rows, run]
    index = ((inside.cumsum(-1) + before[:, None]) <= target).sum(-1)
    return run * _RUN + torch.minimum(index, _last_positive(inside))


def _are_kept(
    runs: torch.Tensor,
    totals: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    params: Sequence[SamplingParams],
) -> list[bool]:
    """Return whether min_p and top_p keep each row's token."""
    if all(p.top_p >= 1.0 and p.min_p <= 0.0 for p in params):
        return [True] * len(params)
    own = runs[rows, tokens // _RUN, tokens % _RUN]
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=runs.device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=runs.device)
    kept = own >= min_p
    if any(p.top_p < 1.0 for p in params):
        # Only runs that have a likelier token are looked at; few do, unless the token is an unlikely one.
        which, run = (runs.amax(-1)[rows] > own[:, None]).nonzero(as_tuple=True)
        part = runs[rows[which], run]
        masses = part.mul_(part > own[which, None]).sum(-1).double()
        likelier = torch.zeros_like(totals).index_add_(0, which, masses)
        kept &= (likelier < top_p * totals) | (top_p >= 1.0)
    result: list[bool] = kept.tolist()
    return result


def _draw_by_rank(
    logits: torch.Tensor, draws: Sequence[TokenDraw], num_sorted: int, *, attempt: int = 0
) -> list[int]:
    """Draw from the likeliest tokens; rows of which the cuts keep more are drawn again from more."""
    params, vocab_size = [draw.params for draw in draws], logits.shape[-1]
    top = logits.amax(-1, keepdim=True)
    values, ids = likeliest_tokens(logits, num_sorted)
    weights, ranks = _weights(values, top, draws).double(), _ranks(values)
    top_k = torch.tensor([p.top_k or vocab_size for p in params], device=logits.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=logits.device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=logits.device)[:, None]
    weights = weights.masked_fill(ranks >= top_k, 0.0)
    totals = weights.sum(-1, keepdim=True)
    if num_sorted < vocab_size and not all(p.top_k for p in params):
        everything = _weights(logits, top, draws).sum(-1, keepdim=True).double()
        totals = torch.where(top_k < vocab_size, totals, everything)
    # A token is kept while the mass of likelier ones is short of top_p; the likeliest always is.
    kept = ((_likelier(weights) < top_p * totals) | (ranks == 0)) & (weights >= min_p) & (ranks < top_k)
    short = (kept[:, -1] & (top_k[:, 0] > num_sorted)).nonzero()[:, 0].tolist()
    weights = weights.masked_fill(~kept, 0.0)
    cumulative = weights.cumsum(-1)
    target = _numbers(draws, attempt, logits)[:, None] * cumulative[:, -1:]
    index = torch.minimum((cumulative <= target).sum(-1), _last_positive(weights))
    tokens: list[int] = ids.gather(-1, index[:, None])[:, 0].tolist()
    if short and num_sorted < vocab_size:
        more = min(16 * num_sorted, vocab_size)
        again = _draw_by_rank(logits[short], [draws[i] for i in short], more, attempt=attempt)
        for row, token in zip(short, again, strict=True):
            tokens[row] = token
    return tokens


def _weights(logits: torch.Tensor, top: torch.Tensor, draws: Sequence[TokenDraw]) -> torch.Tensor:
    """Return exp(logits / temperature), scaled so that the likeliest token, whose logit is `top`, weighs 1."""
    temperature = [draw.params.temperature for draw in draws]
    # Passes over [n, vocab] are what sampling costs: few of them, in place.
    return (logits - top).div_(torch.tensor(temperature, device=logits.device)[:, None]).exp_()


def _numbers(draws: Sequence[TokenDraw], attempt: int, like: torch.Tensor) -> torch.Tensor:
    numbers = [uniform(draw.params.seed, len(draw.token_ids), attempt) for draw in draws]
    return torch.tensor(numbers, dtype=torch.float64, device=like.device)


def _likelier(weights: torch.Tensor) -> torch.Tensor:
    """Return for each of `[n, m]` falling weights the sum of the larger ones; equal ones have the same."""
    before = weights.cumsum(-1) - weights
    begins = torch.ones_like(weights, dtype=torch.bool)
    begins[:, 1:] = weights[:, 1:] < weights[:, :-1]
    return before.masked_fill(~begins, 0.0).cummax(-1).values


def _ranks(weights: torch.Tensor) -> torch.Tensor:
    return torch.arange(weights.shape[-1], device=weights.device)[None, :]


def _last_positive(weights: torch.Tensor) -> torch.Tensor:
    """Return the index of the last positive weight of each row."""
    return (weights > 0).long().cumsum(-1).argmax(-1)
