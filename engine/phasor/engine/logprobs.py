"""Log-probabilities of tokens, as the model itself gives them: before temperature, penalties, bias and cuts."""

from collections.abc import Sequence
from typing import cast

import torch

from phasor.core.request import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Score one token per row.

    Args:
        logits: `[n, vocab]` float32.
        token_ids: the token of each row.
        num_top: how many of the likeliest tokens to name besides, per row.

    Returns:
        one per row, in order.
    """
    if not token_ids:
        return []
    norms = torch.logsumexp(logits, dim=-1)
    index = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    chosen = (logits.gather(-1, index[:, None])[:, 0] - norms).tolist()
    most = max(num_top)
    if most == 0:
        return [TokenLogprobs(logprob) for logprob in chosen]
    values, ids = likeliest_tokens(logits, most)
    tops = (values - norms[:, None]).tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(row_ids[:num], row_values[:num], strict=True)))
        for logprob, num, row_ids, row_values in zip(chosen, num_top, ids.tolist(), tops, strict=True)
    ]


def likeliest_token(logits: torch.Tensor) -> list[int]:
    """Return the id of each row's largest logit, the smallest id where several are: argmax in a third of its time."""
    run, num_rows = 64, logits.shape[0]
    if logits.shape[-1] % run:
        return cast(list[int], logits.argmax(dim=-1).tolist())
    runs = logits.view(num_rows, -1, run)
    best = runs.amax(-1).argmax(-1)
    inside = runs[torch.arange(num_rows, device=logits.device), best].argmax(-1)
    return cast(list[int], (best * run + inside).tolist())


def likeliest_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest logits of each row and their ids, `[n, count]`: falling, ties by rising id."""
    run, vocab_size = 64, logits.shape[-1]
    if vocab_size % run or count * run >= vocab_size:
        values, ids = logits.topk(count, dim=-1)
    else:
        # The largest `count` lie in the `count` runs with the largest maxima: far fewer tokens to sort.
        runs = logits.view(logits.shape[0], -1, run)
        best = runs.amax(-1).topk(count, dim=-1).indices
        inside = runs.gather(1, best[:, :, None].expand(-1, -1, run)).flatten(1)
        values, index = inside.topk(count, dim=-1)
        ids = best.gather(1, index // run) * run + index % run
    # "The first k" must be well defined.
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
