"""Attention over paged KV, and writing K and V into pages: one dispatch, native or torch.

Letters: T tokens of the step, S single queries of the step, H query heads, G KV heads, D key dim, E value dim,
B block_tokens, N blocks of the longest sequence.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from phasor.kernels.linear import ELEMENT_TYPES
from phasor.kernels.native import AttentionArgs, NativeKernels, RotaryArgs, native_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class LongQuery:
    """A sequence with several query tokens (a prompt chunk)."""

    first: int
    count: int
    seq_len: int
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleQueries:
    """The step's sequences with one query token each (decoding)."""

    rows: torch.Tensor
    """`[S]` int64: their rows in the packed step."""
    tables: torch.Tensor
    """`[S, N]` int64: their block tables, padded with the null block (0)."""
    lengths: torch.Tensor
    """`[S]` int64: positions to attend to, the query's own included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedQueries:
    """R single queries of similar length, as torch wants them: computed together over gathered, padded KV."""

    rows: torch.Tensor
    """`[R]` int64."""
    tables: torch.Tensor
    """`[R, N]` int64, padded with the null block (0), which holds zeros."""
    last_blocks: torch.Tensor
    """`[R]` int64: index into the table of the last block in use."""
    last_valid: torch.Tensor
    """`[R, B]` bool: which rows of that block exist."""
    valid: torch.Tensor
    """`[R, N*B]` bool: which gathered positions exist."""


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Where each of a step's packed tokens belongs. Built once per step, used by every layer."""

    block_tokens: int
    slot_blocks: torch.Tensor
    """`[T]` int64: the block that each token's K and V are written to."""
    slot_offsets: torch.Tensor
    """`[T]` int64: the row within that block."""
    single_queries: SingleQueries | None
    long_queries: tuple[LongQuery, ...]

    @functools.cached_property
    def padded_queries(self) -> tuple[PaddedQueries, ...]:
        """The single queries for torch: grouped by the power of two of their number of blocks.

        So one long sequence does not make every short one gather as much.
        """
        singles = self.single_queries
        if singles is None:
            return ()
        used = (singles.lengths + self.block_tokens - 1) // self.block_tokens
        groups: dict[int, list[int]] = {}
        for index, num_blocks in enumerate(used.tolist()):
            groups.setdefault(num_blocks.bit_length(), []).append(index)
        return tuple(
            _padded(singles, torch.tensor(group, device=used.device), used, self.block_tokens)
            for group in groups.values()
        )


def build_metadata(
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_tokens: int,
    device: str,
) -> AttentionMetadata:
    """Lay out a step of sequences with `counts` new tokens at positions `starts`; packed in the order given."""
    num_tokens = sum(counts)
    blocks, offsets = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.int64)
    single_rows: list[int] = []
    singles: list[tuple[int, Sequence[int]]] = []
    long_queries: list[LongQuery] = []
    first = 0
    for start, count, table in zip(starts, counts, tables, strict=True):
        seq_len = start + count
        used = -(-seq_len // block_tokens)
        if count == 1:
            single_rows.append(first)
            singles.append((seq_len, table[:used]))
            blocks[first], offsets[first] = table[start // block_tokens], start % block_tokens
        elif count:
            ids = np.array(table[:used], np.int64)
            positions = np.arange(start, seq_len)
            blocks[first : first + count] = ids[positions // block_tokens]
            offsets[first : first + count] = positions % block_tokens
            on_device = torch.from_numpy(ids).to(device)
            long_queries.append(LongQuery(first=first, count=count, seq_len=seq_len, blocks=on_device))
        first += count
    return AttentionMetadata(
        block_tokens=block_tokens,
        slot_blocks=torch.from_numpy(blocks).to(device),
        slot_offsets=torch.from_numpy(offsets).to(device),
        single_queries=_single_queries(single_rows, singles, device) if singles else None,
        long_queries=tuple(long_queries),
    )


def _single_queries(
    rows: Sequence[int], singles: Sequence[tuple[int, Sequence[int]]], device: str
) -> SingleQueries:
    tables = np.zeros((len(singles), max(len(table) for _, table in singles)), np.int64)
    for row, (_, table) in zip(tables, singles, strict=True):
        row[: len(table)] = table
    return SingleQueries(
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
        tables=torch.from_numpy(tables).to(device),
        lengths=torch.tensor([seq_len for seq_len, _ in singles], dtype=torch.int64, device=device),
    )


def _padded(
    singles: SingleQueries, chosen: torch.Tensor, used: torch.Tensor, block_tokens: int
) -> PaddedQueries:
    lengths, longest = singles.lengths[chosen], int(used[chosen].max())
    last_blocks = used[chosen] - 1
    in_block = torch.arange(block_tokens, device=lengths.device)
    positions = torch.arange(longest * block_tokens, device=lengths.device)
    return PaddedQueries(
        rows=singles.rows[chosen],
        tables=singles.tables[chosen, :longest],
        last_blocks=last_blocks,
        last_valid=in_block[None, :] < (lengths - last_blocks * block_tokens)[:, None],
        valid=positions[None, :] < lengths[:, None],
    )


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    """Write `[T, G, D]` keys and `[T, G, E]` values into their slots of the pool, in place."""
    native = native_kernels()
    if native is not None and _is_native(k):
        _write_native(native, _whole_rows(k), _whole_rows(v), k_pages, v_pages, metadata)
        return
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
    native = native_kernels()
    singles = metadata.single_queries
    if singles is not None and native is not None and _is_native(query):
        attend_native(native, _whole_rows(query), k_pages, v_pages, singles, out, scale)
    else:
        for padded in metadata.padded_queries:
            out[padded.rows] = attend_padded(query[padded.rows], k_pages, v_pages, padded, scale)
    for long_query in metadata.long_queries:
        rows = slice(long_query.first, long_query.first + long_query.count)
        out[rows] = _attend_long(query[rows], k_pages, v_pages, long_query, scale)
    return out


def _is_native(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in ELEMENT_TYPES


def _whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a copy whose rows are contiguous `[heads, dim]` where its own are not."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def attend_native(
    native: NativeKernels,
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    singles: SingleQueries,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Fill the single queries' rows of `out`, `[T, H, E]`, reading pages in place."""
    assert k_pages.stride(3) == 1 and v_pages.stride(3) == 1
    native.attention(
        AttentionArgs(
            query.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            out.data_ptr(),
            singles.rows.data_ptr(),
            singles.tables.data_ptr(),
            singles.lengths.data_ptr(),
            singles.tables.shape[0],
            singles.tables.shape[1],
            query.stride(0),
            out.stride(0),
            *k_pages.stride()[:3],
            *v_pages.stride()[:3],
            query.shape[1],
            k_pages.shape[1],
            k_pages.shape[3],
            v_pages.shape[3],
            k_pages.shape[2],
            scale,
            ELEMENT_TYPES[query.dtype],
        )
    )


def _write_native(
    native: NativeKernels,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    native.rotary(
        RotaryArgs(
            None,
            k.data_ptr(),
            v.data_ptr(),
            None,
            None,
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            metadata.slot_blocks.data_ptr(),
            metadata.slot_offsets.data_ptr(),
            k.shape[0],
            0,
            k.stride(0),
            v.stride(0),
            *k_pages.stride()[:3],
            *v_pages.stride()[:3],
            0,
            k.shape[1],
            k.shape[2],
            v.shape[2],
            0,
            ELEMENT_TYPES[k.dtype],
        )
    )


def attend_padded(
    query: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, single: PaddedQueries, scale: float
) -> torch.Tensor:
    """Attend `[R, H, D]` single queries with torch, over gathered copies of their pages."""
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
