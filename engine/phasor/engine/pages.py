"""The one page layout: pool, wire and store hold the same bytes (DESIGN section 3).

    block = page of KV head 0 | page of KV head 1 | ...                       contiguous
    page  = layer 0: K tile, V tile | layer 1: K tile, V tile | ...           contiguous
    tile  = [block_tokens, k_dim] or [block_tokens, v_dim], row-major

A head range of a block is therefore a contiguous slice. Nobody else computes an offset.
"""

from dataclasses import dataclass

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """The arithmetic of pages of one layer group. All offsets are in elements from the start of a page."""

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    block_tokens: int
    dtype: str
    """"float32", "bfloat16" or "float16"."""

    @property
    def layer_elements(self) -> int:
        """Elements of one layer's K and V tiles of one head."""
        return self.block_tokens * (self.k_dim + self.v_dim)

    @property
    def page_elements(self) -> int:
        """Elements of one page."""
        return self.num_layers * self.layer_elements

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_elements * _ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all KV heads."""
        return self.num_kv_heads * self.page_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes of KV per token: 2 * layers * kv_heads * head_dim * item bytes when K and V are alike."""
        return self.block_bytes / self.block_tokens

    def k_offset(self, layer: int) -> int:
        """Return where the K tile of `layer` (index within the group) starts in a page."""
        return layer * self.layer_elements

    def v_offset(self, layer: int) -> int:
        """Return where the V tile of `layer` (index within the group) starts in a page."""
        return layer * self.layer_elements + self.block_tokens * self.k_dim

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_tokens)
