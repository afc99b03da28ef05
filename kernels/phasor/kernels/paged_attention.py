"""Attention over paged KV, and writing K and V into pages: torch reference, used on CPUs.

Letters: T tokens of the step, S sequences of the step, H query heads, G KV heads, D key dim, E value dim,
B block_tokens, N blocks of the longest sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812


@dataclass(frozen=True, slots=True, kw_only=True)
class LongQuery:
    """A sequence with several query tokens (a prompt chunk)."""

    first: int
    count: int
    seq_len: int
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where each of a step's packed tokens belongs. Built once per step, used by every layer."""

    slot_blocks: torch.Tensor
    """`[T]` int64: the block that each token's K and V are written to."""
    slot_offsets: torch.Tensor
    """`[T]` int64: the row within that block."""
    single_rows: torch.Tensor
    """`[R]` int64: rows of the packed step whose sequence has one query token."""
    single_tables: torch.Tensor
    """`[R, N]` int64: their block tables, padded with the null block."""
    single_valid: torch.Tensor
    """`[R, N*B]` bool: which gathered positions exist."""
    long_queries: tuple[LongQuery, ...]


def build_metadata(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_tokens: int,
    device: str,
) -> AttentionMetadata:
    """Lay out a step of sequences with `counts` new tokens at positions `starts`."""
    blocks: list[int] = []
    offsets: list[int] = []
    rows: list[int] = []
    single: list[int] = []
    long_queries: list[LongQuery] = []
    first = 0
    for index, (start, count) in enumerate(zip(starts, counts, strict=True)):
        table = tables[index]
        for position in range(start, start + count):
            blocks.append(table[position // block_tokens])
            offsets.append(position % block_tokens)
        if count == 1:
            rows.append(first)
            single.append(index)
        else:
            used = -(-(start + count) // block_tokens)
            ids = torch.tensor(table[:used], dtype=torch.int64, device=device)
            long_queries.append(LongQuery(first=first, count=count, seq_len=start + count, blocks=ids))
        first += count
    longest = max((-(-(starts[i] + 1) // block_tokens) for i in single), default=0)
    padded = torch.zeros(len(single), longest, dtype=torch.int64)
    for row, index in enumerate(single):
        used = -(-(starts[index] + 1) // block_tokens)
        padded[row, :used] = torch.tensor(tables[index][:used], dtype=torch.int64)
    lens = torch.tensor([starts[i] + 1 for i in single], dtype=torch.int64)
    valid = torch.arange(longest * block_tokens)[None, :] < lens[:, None]
    return AttentionMetadata(
        slot_blocks=torch.tensor(blocks, dtype=torch.int64, device=device),
        slot_offsets=torch.tensor(offsets, dtype=torch.int64, device=device),
        single_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        single_tables=padded.to(device),
        single_valid=valid.to(device),
        long_queries=tuple(long_queries),
    )


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    """Write `[T, G, D]` keys and `[T, G, E]` values into their slots of the pool, in place."""
    k_pages[metadata.slot_blocks, :, metadata.slot_offsets] = k
    v_pages[metadata.slot_blocks, :, metadata.slot_offsets] = v


def paged_attention(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend each query token to all positions up to its own.

    Args:
        query: `[T, H, D]`.
        k_pages: `[num_blocks, G, B, D]`, any strides; the step's own keys are written already.
        v_pages: `[num_blocks, G, B, E]`.
        metadata: the step's layout.
        scale: softmax scale.

    Returns:
        `[T, H, E]`, contiguous. Rows past a sequence's end never reach it, whatever they hold (NaN included).
    """
    out = query.new_empty(query.shape[0], query.shape[1], v_pages.shape[-1])
    if metadata.single_rows.numel():
        out[metadata.single_rows] = _attend_single(
            query[metadata.single_rows], k_pages, v_pages, metadata, scale
        )
    for long_query in metadata.long_queries:
        rows = slice(long_query.first, long_query.first + long_query.count)
        out[rows] = _attend_long(query[rows], k_pages, v_pages, long_query, scale)
    return out


def _attend_single(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    num_rows, num_heads, k_dim = query.shape
    groups = k_pages.shape[1]
    length = metadata.single_valid.shape[1]
    k = k_pages[metadata.single_tables].transpose(1, 2).reshape(num_rows, groups, length, k_dim)
    v = v_pages[metadata.single_tables].transpose(1, 2).reshape(num_rows, groups, length, -1)
    invalid = ~metadata.single_valid[:, None, :, None]
    # 0 * NaN is NaN: rows past the end must not be multiplied at all.
    v = v.masked_fill(invalid, 0)
    q = query.view(num_rows, groups, num_heads // groups, k_dim)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~metadata.single_valid[:, None, None, :], float("-inf"))
    weights = scores.softmax(-1).to(v.dtype)
    return (weights @ v).reshape(num_rows, num_heads, -1)


def _attend_long(
    query: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, long_query: LongQuery, scale: float
) -> torch.Tensor:
    groups, length = k_pages.shape[1], long_query.seq_len
    k = k_pages[long_query.blocks].transpose(0, 1).flatten(1, 2)[:, :length]
    v = v_pages[long_query.blocks].transpose(0, 1).flatten(1, 2)[:, :length]
    past = length - long_query.count
    mask = None
    if past:
        positions = torch.arange(length, device=query.device)
        mask = positions[None, :] <= torch.arange(past, length, device=query.device)[:, None]
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=groups != query.shape[1],
    )
    return out[0].transpose(0, 1)
