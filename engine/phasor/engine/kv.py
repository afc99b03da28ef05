"""The paged KV pool's tensor: one per worker, `[num_blocks, kv_heads, page_elements]`; block 0 is the null block."""

from collections.abc import Iterator, Sequence

import torch

from phasor.core.ids import NULL_BLOCK, BlockId
from phasor.engine.pages import PageLayout


def num_blocks_for_budget(layout: PageLayout, memory_bytes: int) -> int:
    """Return how many blocks (the null block included) fit into `memory_bytes`."""
    return memory_bytes // layout.block_bytes


class PagedKV:
    """Owns the pool. Who may touch which block when is `phasor.engine.blocks`' business.

    Args:
        layout: the page layout.
        num_blocks: blocks, the null block included.
        device: where the pool lives.
    """

    def __init__(self, layout: PageLayout, num_blocks: int, *, device: str) -> None:
        self.layout = layout
        shape = (num_blocks, layout.num_kv_heads, layout.page_elements)
        self.pool = torch.empty(shape, dtype=getattr(torch, layout.dtype), device=device)
        # Padded block tables read the null block: it must hold numbers, whatever fills the rest.
        self.pool[NULL_BLOCK].zero_()

    def layer_views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of one layer's keys and values, `[num_blocks, kv_heads, block_tokens, dim]`, strided."""
        layout = self.layout
        num_blocks, heads = self.pool.shape[:2]
        k_start, v_start = layout.k_offset(layer), layout.v_offset(layer)
        k = self.pool[:, :, k_start : k_start + layout.block_tokens * layout.k_dim]
        v = self.pool[:, :, v_start : v_start + layout.block_tokens * layout.v_dim]
        return (
            k.view(num_blocks, heads, layout.block_tokens, layout.k_dim),
            v.view(num_blocks, heads, layout.block_tokens, layout.v_dim),
        )

    def block_slices(self, blocks: Sequence[BlockId]) -> list[torch.Tensor]:
        """Return the blocks' bytes in order as contiguous views, neighbouring ids joined; nothing is copied.

        Each is `[n, kv_heads, page_elements]`. They are valid while the caller holds the blocks.
        """
        return [self.pool[first : first + count] for first, count in _runs(blocks)]

    def place(self, blocks: Sequence[BlockId], pages: torch.Tensor) -> None:
        """Copy `[len(blocks), kv_heads, page_elements]` staged pages into the blocks."""
        assert NULL_BLOCK not in blocks, "the null block is never written"
        assert pages.shape[0] == len(blocks), f"{pages.shape[0]} pages for {len(blocks)} blocks"
        # By runs: an indexed write of the whole takes half as long again, also where every run is one block.
        placed = 0
        for first, count in _runs(blocks):
            self.pool[first : first + count].copy_(pages[placed : placed + count])
            placed += count

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Copy one block's bytes onto another's."""
        assert target != NULL_BLOCK, "the null block is never written"
        self.pool[target].copy_(self.pool[source])


def _runs(blocks: Sequence[BlockId]) -> Iterator[tuple[int, int]]:
    first = count = 0
    for block in blocks:
        if count and block == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block, 1
    if count:
        yield first, count
