"""Block accounting: eviction order as data, and invariants under random use."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasor.core.errors import CapacityError
from phasor.core.identity import block_keys
from phasor.core.ids import BlockKey
from phasor.engine.blocks import BlockPool

NAMESPACE = BlockKey(bytes(32))


def cached_sequence(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Allocate, register and free the whole blocks of `tokens`; returns the block ids."""
    keys = block_keys(NAMESPACE, tokens, pool.block_tokens)
    blocks = pool.allocate(len(keys))
    for i, (block, key) in enumerate(zip(blocks, keys, strict=True)):
        pool.register(block, key, tokens[i * pool.block_tokens : (i + 1) * pool.block_tokens])
    pool.free_blocks(blocks)
    return list(blocks)


def test_allocates_in_order_and_never_the_null_block() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=2)
    assert pool.allocate(3) == [1, 2, 3]
    with pytest.raises(CapacityError, match="1 blocks wanted, 0 of 3 free"):
        pool.allocate(1)


def test_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=2)
    with pytest.raises(CapacityError):
        pool.allocate(4)
    assert pool.num_free == 3


def test_tail_is_evicted_before_head_and_older_before_newer() -> None:
    pool = BlockPool(num_blocks=7, block_tokens=2)
    first = cached_sequence(pool, [1, 2, 3, 4, 5, 6])
    second = cached_sequence(pool, [7, 8, 9, 10, 11, 12])
    assert (first, second) == ([1, 2, 3], [4, 5, 6])
    assert pool.allocate(6) == [3, 2, 1, 6, 5, 4]
    assert pool.num_cached == 0


def test_uncached_blocks_are_taken_before_cached_content() -> None:
    pool = BlockPool(num_blocks=5, block_tokens=2)
    cached_sequence(pool, [1, 2])
    assert pool.allocate(3) == [2, 3, 4]
    assert pool.match(block_keys(NAMESPACE, [1, 2], 2), [1, 2]) == [1]


def test_a_hit_makes_a_block_recent() -> None:
    pool = BlockPool(num_blocks=3, block_tokens=2)
    cached_sequence(pool, [1, 2])
    cached_sequence(pool, [3, 4])
    pool.share(pool.match(block_keys(NAMESPACE, [1, 2], 2), [1, 2]))
    pool.free_blocks([1])
    assert pool.allocate(1) == [2]


def test_match_stops_at_first_gap() -> None:
    pool = BlockPool(num_blocks=9, block_tokens=2)
    tokens = list(range(8))
    keys = block_keys(NAMESPACE, tokens, 2)
    blocks = pool.allocate(4)
    for i in (0, 1, 3):
        pool.register(blocks[i], keys[i], tokens[2 * i : 2 * i + 2])
    assert pool.match(keys, tokens) == blocks[:2]


def test_collision_is_a_miss() -> None:
    pool = BlockPool(num_blocks=3, block_tokens=2)
    key = BlockKey(b"x" * 32)
    pool.register(pool.allocate(1)[0], key, [1, 2])
    assert pool.match([key], [1, 3]) == []
    assert pool.match([key], [1, 2]) == [1]


def test_second_block_with_the_same_key_stays_anonymous() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=2)
    a, b = pool.allocate(2)
    key = BlockKey(b"k" * 32)
    assert pool.register(a, key, [1, 2])
    assert not pool.register(b, key, [1, 2])
    pool.free_blocks([b])
    assert pool.num_cached == 0
    pool.free_blocks([a])
    assert pool.num_cached == 1
    pool.check()


def test_freeing_more_often_than_taken_is_a_bug() -> None:
    pool = BlockPool(num_blocks=3, block_tokens=2)
    blocks = pool.allocate(1)
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free_blocks(blocks)


def test_drop_cached_forgets_content_but_not_held_blocks() -> None:
    pool = BlockPool(num_blocks=4, block_tokens=2)
    cached_sequence(pool, [1, 2])
    held = pool.allocate(1)
    assert pool.drop_cached() == 1
    assert (pool.num_cached, pool.num_used, pool.num_free) == (0, 1, 2)
    pool.free_blocks(held)
    pool.check()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("afsr"), st.integers(0, 7), st.integers(0, 3)), max_size=80))
def test_any_use_keeps_every_block_in_exactly_one_place(steps: list[tuple[str, int, int]]) -> None:
    """Random sequences over a tiny alphabet, so that hits, collisions of keys and eviction all happen."""
    pool = BlockPool(num_blocks=8, block_tokens=2)
    held: list[tuple[list[int], list[int]]] = []
    for what, number, seed in steps:
        tokens = [seed, seed, number % 2, number % 3, number, number][: 2 * (number % 3 + 1)]
        keys = block_keys(NAMESPACE, tokens, 2)
        if what == "a":
            hit = pool.match(keys, tokens)
            pool.share(hit)
            if len(keys) - len(hit) <= pool.num_free:
                held.append((hit + pool.allocate(len(keys) - len(hit)), tokens))
            else:
                pool.free_blocks(hit)
        elif held and what == "f":
            blocks, _ = held.pop(number % len(held))
            pool.free_blocks(blocks)
        elif held and what == "s":
            blocks, owned = held[number % len(held)]
            pool.share(blocks)
            held.append((list(blocks), owned))
        elif held and what == "r":
            blocks, owned = held[number % len(held)]
            for i, key in enumerate(block_keys(NAMESPACE, owned, 2)):
                pool.register(blocks[i], key, owned[2 * i : 2 * i + 2])
        pool.check()
        expected: dict[int, int] = {}
        for blocks, _ in held:
            for block in blocks:
                expected[block] = expected.get(block, 0) + 1
        assert {b: pool.num_refs(b) for b in range(1, 8) if pool.num_refs(b)} == expected
    for blocks, _ in held:
        pool.free_blocks(blocks)
    pool.check()
    assert pool.num_used == 0
