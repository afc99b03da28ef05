"""Log-probabilities of tokens, as the model itself gives them: before temperature, penalties, bias and cuts."""

from collections.abc import Sequence

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
    values, ids = logits.topk(most, dim=-1)
    tops = (values - norms[:, None]).tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(row_ids[:num], row_values[:num], strict=True)))
        for logprob, num, row_ids, row_values in zip(chosen, num_top, ids.tolist(), tops, strict=True)
    ]
