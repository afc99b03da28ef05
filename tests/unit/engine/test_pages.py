"""PageLayout's arithmetic against the picture in its docstring, tile by tile."""

import pytest

from phasor.engine.pages import PageLayout

LAYOUT = PageLayout(num_layers=3, num_kv_heads=2, k_dim=5, v_dim=7, block_tokens=4, dtype="bfloat16")


def test_tiles_follow_each_other_without_gap_or_overlap() -> None:
    covered: list[int] = []
    for layer in range(3):
        covered += range(LAYOUT.k_offset(layer), LAYOUT.k_offset(layer) + 4 * 5)
        covered += range(LAYOUT.v_offset(layer), LAYOUT.v_offset(layer) + 4 * 7)
    assert covered == list(range(LAYOUT.page_elements))


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes(dtype: str, item: int) -> None:
    layout = PageLayout(num_layers=30, num_kv_heads=3, k_dim=64, v_dim=64, block_tokens=16, dtype=dtype)
    assert layout.token_bytes == 2 * 30 * 3 * 64 * item
    assert layout.block_bytes == 16 * 2 * 30 * 3 * 64 * item
    assert layout.page_bytes * 3 == layout.block_bytes


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_num_blocks_for(tokens: int, blocks: int) -> None:
    assert LAYOUT.num_blocks_for(tokens) == blocks
