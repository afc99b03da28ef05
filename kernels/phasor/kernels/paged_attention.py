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
class SingleQueries:
    """R sequences of similar length with one query token each (decoding), computed together."""

    rows: torch.Tensor
    """`[R]` int64: their rows in the packed step."""
    tables: torch.Tensor
    """`[R, N]` int64: their block tables, padded with the null block (0), which holds zeros."""
    last_blocks: torch.Tensor
    """`[R]` int64: index into the table of the last block in use."""
    last_valid: torch.Tensor
    """`[R, B]` bool: which rows of that block exist."""
    valid: torch.Tensor
    """`[R, N*B]` bool: which gathered positions exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where each of a step's packed tokens belongs. Built once per step, used by every layer."""

    slot_blocks: torch.Tensor
    """`[T]` int64: the block that each token's K and V are written to."""
    slot_offsets: torch.Tensor
    """`[T]` int64: the row within that block."""
    single_queries: tuple[SingleQueries, ...]
    long_queries: tuple[LongQuery, ...]


def build_metadata(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_tokens: int,
    device: str,
) -> AttentionMetadata:
    """Lay out a step of sequences with `counts` new tokens at positions `starts`.

    Sequences are packed in the order given. Single queries are grouped by the power of two of their length, so
    that one long sequence does not make every short one gather as much.
    """
    blocks: list[int] = []
    offsets: list[int] = []
    groups: dict[int, list[tuple[int, int, Sequence[int]]]] = {}
    long_queries: list[LongQuery] = []
    first = 0
    for start, count, table in zip(starts, counts, tables, strict=True):
        seq_len = start + count
        used = -(-seq_len // block_tokens)
        blocks.extend(table[position // block_tokens] for position in range(start, seq_len))
        offsets.extend(position % block_tokens for position in range(start, seq_len))
        if count == 1:
            groups.setdefault(used.bit_length(), []).append((first, seq_len, table[:used]))
        else:
            ids = torch.tensor(table[:used], dtype=torch.int64, device=device)
            long_queries.append(LongQuery(first=first, count=count, seq_len=seq_len, blocks=ids))
        first += count
    return AttentionMetadata(
        slot_blocks=torch.tensor(blocks, dtype=torch.int64, device=device),
        slot_offsets=torch.tensor(offsets, dtype=torch.int64, device=device),
        single_queries=tuple(_single_queries(group, block_tokens, device) for group in groups.values()),
        long_queries=tuple(long_queries),
    )


def _single_queries(
    group: Sequence[tuple[int, int, Sequence[int]]], block_tokens: int, device: str
) -> SingleQueries:
    """Pad the tables of `(row, seq_len, table)` triples to the longest."""
    longest = max(len(table) for _, _, table in group)
    tables = torch.tensor(
        [[*table, *[0] * (longest - len(table))] for _, _, table in group], dtype=torch.int64
    )
    lens = torch.tensor([seq_len for _, seq_len, _ in group], dtype=torch.int64)
    last_blocks = (lens - 1) // block_tokens
    last_valid = torch.arange(block_tokens)[None, :] < (lens - last_blocks * block_tokens)[:, None]
    return SingleQueries(
        rows=torch.tensor([row for row, _, _ in group], dtype=torch.int64, device=device),
        tables=tables.to(device),
        last_blocks=last_blocks.to(device),
        last_valid=last_valid.to(device),
        valid=(torch.arange(longest * block_tokens)[None, :] < lens[:, None]).to(device),
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
    for single in metadata.single_queries:
        out[single.rows] = _attend_single(query[single.rows], k_pages, v_pages, single, scale)
    for long_query in metadata.long_queries:
        rows = slice(long_query.first, long_query.first + long_query.count)
        out[rows] = _attend_long(query[rows], k_pages, v_pages, long_query, scale)
    return out


def _attend_single(
    query: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, single: SingleQueries, scale: float
) -> torch.Tensor:
    num_rows, num_heads, k_dim = query.shape
    num_groups = k_pages.shape[1]
    # One gather straight into [R, G, N, B, dim]: a transpose afterwards would copy everything once more.
    tables, heads = single.tables[:, None, :], torch.arange(num_groups, device=query.device)[None, :, None]
    k, v = k_pages[tables, heads], v_pages[tables, heads]
    # Rows past the end of the last block are undefined, and 0 * NaN is NaN: they must not be multiplied at all.
    each = torch.arange(num_rows, device=query.device)
    tail = v[each, :, single.last_blocks]
    v[each, :, single.last_blocks] = tail.masked_fill(~single.last_valid[:, None, :, None], 0)
    q = query.view(num_rows, num_groups, num_heads // num_groups, k_dim)
    scores = (q @ k.flatten(2, 3).transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~single.valid[:, None, None, :], float("-inf"))
    weights = scores.softmax(-1).to(v.dtype)
    return (weights @ v.flatten(2, 3)).reshape(num_rows, num_heads, -1)


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
