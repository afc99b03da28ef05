"""The pool's views and slices: the right bytes, in order, never copied."""

import pytest
import torch

from phasor.core.ids import NULL_BLOCK, BlockId
from phasor.engine.kv import PagedKV, num_blocks_for_budget
from phasor.engine.pages import PageLayout

LAYOUT = PageLayout(num_layers=3, num_kv_heads=2, k_dim=5, v_dim=7, block_tokens=4, dtype="float32")
NUM_BLOCKS = 12


@pytest.fixture
def kv() -> PagedKV:
    return PagedKV(LAYOUT, NUM_BLOCKS, device="cpu")


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def test_only_the_null_block_is_zeroed(kv: PagedKV) -> None:
    assert torch.equal(kv.pool[NULL_BLOCK], torch.zeros(2, LAYOUT.page_elements))
    assert kv.pool[1:].isnan().all(), "uninitialised memory is poisoned here: the pool should not be filled"


def test_views_lie_where_the_layout_says(kv: PagedKV) -> None:
    for layer in range(3):
        k, v = kv.layer_views(layer)
        assert k.shape == (NUM_BLOCKS, 2, 4, 5) and v.shape == (NUM_BLOCKS, 2, 4, 7)
        for block, head, token in ((3, 0, 0), (5, 1, 3), (11, 1, 2)):
            k[block, head, token] = torch.arange(5.0) + 1000 * layer + 10 * token
            v[block, head, token] = torch.arange(7.0) - 1000 * layer - 10 * token - 1
    for layer in range(3):
        for block, head, token in ((3, 0, 0), (5, 1, 3), (11, 1, 2)):
            page = kv.pool[block, head]
            k_at = layer * 4 * 12 + token * 5
            v_at = layer * 4 * 12 + 4 * 5 + token * 7
            assert page[k_at : k_at + 5].tolist() == [1000 * layer + 10 * token + i for i in range(5)]
            assert page[v_at : v_at + 7].tolist() == [i - 1000 * layer - 10 * token - 1 for i in range(7)]
    assert int((~kv.pool[1:].isnan()).sum()) == 3 * 3 * 12, "something else was written"


def test_slices_join_neighbours_and_keep_order(kv: PagedKV) -> None:
    slices = kv.block_slices(ids(7, 8, 9, 3, 2, 5, 6))
    block_bytes = LAYOUT.block_bytes
    at = [((s.data_ptr() - kv.pool.data_ptr()) / block_bytes, s.shape[0]) for s in slices]
    assert at == [(7, 3), (3, 1), (2, 1), (5, 2)]
    assert all(s.is_contiguous() and s.shape[1:] == (2, LAYOUT.page_elements) for s in slices)
    assert kv.block_slices([]) == []
    assert [s.shape[0] for s in kv.block_slices(ids(4, 4))] == [1, 1]


def test_place_then_slices_give_the_same_bytes(kv: PagedKV) -> None:
    blocks = ids(9, 2, 3, 11, 1)
    pages = torch.randn(5, 2, LAYOUT.page_elements, generator=torch.Generator().manual_seed(1))
    kv.place(blocks, pages)
    assert torch.equal(torch.cat(kv.block_slices(blocks)), pages)
    others = [block for block in range(1, NUM_BLOCKS) if block not in blocks]
    assert kv.pool[others].isnan().all()
    assert not kv.pool[NULL_BLOCK].any()


def test_the_null_block_is_never_placed(kv: PagedKV) -> None:
    with pytest.raises(AssertionError, match="null block"):
        kv.place(ids(3, 0), torch.ones(2, 2, LAYOUT.page_elements))
    assert not kv.pool[NULL_BLOCK].any()


def test_num_blocks_for_budget() -> None:
    size = LAYOUT.block_bytes
    assert [num_blocks_for_budget(LAYOUT, n) for n in (0, size - 1, size, 10 * size - 1, 10 * size)] == [
        0,
        0,
        1,
        9,
        10,
    ]
