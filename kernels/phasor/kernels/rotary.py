"""Rotary embedding with the write into pages, in one pass over the step's tokens: one dispatch, native or torch.

Half-split ("NeoX") pairing. Letters: T tokens, H query heads, G KV heads, D key dim, E value dim, R rotary dim.
"""

import torch

from phasor.kernels.linear import ELEMENT_TYPES
from phasor.kernels.native import NativeKernels, RotaryArgs, native_kernels
from phasor.kernels.paged_attention import AttentionMetadata, write_kv


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into their slots, and return the rotated queries.

    Both paths give the same bits: torch's, which round to the dtype after every operation.

    Args:
        query: `[T, H, D]`, each row's `[H, D]` contiguous; MAY BE OVERWRITTEN with what is returned.
        key: `[T, G, D]`, likewise; not modified.
        value: `[T, G, E]`, likewise; not modified.
        cos: `[T, R]`, contiguous, the dtype of all others; R = D or less (the rest of a head is not rotated).
        sin: likewise.
        k_pages: `[num_blocks, G, B, D]`.
        v_pages: `[num_blocks, G, B, E]`.
        metadata: the step's slots.
    """
    native = native_kernels()
    if native is not None and query.device.type == "cpu" and query.dtype in ELEMENT_TYPES:
        rotate_and_write_native(native, query, key, value, cos, sin, k_pages, v_pages, metadata)
        return query
    write_kv(rotate_torch(key, cos, sin), value, k_pages, v_pages, metadata)
    return rotate_torch(query, cos, sin)


def rotate_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `[T, heads, D]`; the reference."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


def rotate_and_write_native(
    native: NativeKernels,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    """Rotate `query` in place and fill the pages."""
    assert key.stride()[1:] == (key.shape[2], 1) and value.stride()[1:] == (value.shape[2], 1)
    assert query.stride()[1:] == (query.shape[2], 1) and cos.is_contiguous() and sin.is_contiguous()
    args = RotaryArgs(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        metadata.slot_blocks.data_ptr(),
        metadata.slot_offsets.data_ptr(),
        query.shape[0],
        query.stride(0),
        key.stride(0),
        value.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        query.shape[1],
        key.shape[1],
        key.shape[2],
        value.shape[2],
        cos.shape[-1],
        ELEMENT_TYPES[query.dtype],
    )
    native.rotary(args)
