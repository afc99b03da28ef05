"""Who owns which block. Ids only: the tensors live in `phasor.engine.kv`.

A block is in exactly one of four places:

    null      block 0, belongs to nobody, is never written
    used      at least one sequence holds it (reference count >= 1)
    cached    nobody holds it, but its content is known by a key and can be had again
    free      nobody holds it and its content is worth nothing

    allocate: free, else the least recently used cached -> used      free_blocks: used -> cached or free
    share:    used or cached -> used                                 register:    used stays used, gains a key

A sequence's blocks are freed last-first, so the tail of a prefix is evicted before its head: a head without
its tail can still be matched, a tail without its head never.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phasor.core.errors import CapacityError
from phasor.core.ids import NULL_BLOCK, BlockId, BlockKey


@dataclass(frozen=True, slots=True)
class CachedContent:
    """What a block with a key holds. The tokens are compared on a hit: a collision is a miss."""

    key: BlockKey
    token_ids: tuple[int, ...]


class BlockPool:
    """Allocates, shares, caches and evicts block ids. Pure: no tensors, no clock, not thread-safe.

    Args:
        num_blocks: blocks in the pool, the null block included.
        block_tokens: tokens per block.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block), got {num_blocks}")
        self.block_tokens = block_tokens
        self._num_refs = [0] * num_blocks
        self._content: dict[BlockId, CachedContent] = {}
        self._by_key: dict[BlockKey, BlockId] = {}
        self._free: deque[BlockId] = deque(BlockId(i) for i in range(1, num_blocks))
        # Least recently used first. An OrderedDict, because a hit takes a block out of the middle in O(1).
        self._cached: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Blocks that can be used: all but the null block."""
        return len(self._num_refs) - 1

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but whose content can still be matched."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks, evicting cached content if need be.

        The caller owns one reference to each until it passes them to `free_blocks`. Their bytes are undefined.

        Raises:
            CapacityError: fewer than `count` are free; nothing was taken.
        """
        if count > self.num_free:
            raise CapacityError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        taken: list[BlockId] = []
        for _ in range(count):
            block = self._free.popleft() if self._free else self._evict_oldest()
            assert self._num_refs[block] == 0, f"block {block} was free but held"
            self._num_refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Take one more reference to each block, which must be used or cached."""
        for block in blocks:
            if self._num_refs[block] == 0:
                assert block in self._cached, f"block {block} is neither held nor cached"
                del self._cached[block]
            self._num_refs[block] += 1

    def free_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Give back one reference to each block of a sequence, given in sequence order."""
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            assert self._num_refs[block] > 0, f"block {block} freed more often than taken"
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                if block in self._content:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: BlockId, key: BlockKey, token_ids: Sequence[int]) -> bool:
        """Make a held, complete, pure block findable by `key`.

        Returns:
            False when another block already has this key (that one stays) or this block already has a key.
        """
        assert self._num_refs[block] > 0, f"block {block} registered by somebody who does not hold it"
        assert len(token_ids) == self.block_tokens, "only whole blocks have keys"
        if key in self._by_key or block in self._content:
            return False
        self._content[block] = CachedContent(key, tuple(token_ids))
        self._by_key[key] = block
        return True

    def match(self, keys: Sequence[BlockKey], token_ids: Sequence[int]) -> list[BlockId]:
        """Return the blocks of the longest known prefix; takes no reference (call `share` next).

        Stops at the first key that is unknown or whose tokens differ from `token_ids`.
        """
        found: list[BlockId] = []
        for index, key in enumerate(keys):
            block = self._by_key.get(key)
            if block is None:
                break
            start = index * self.block_tokens
            if self._content[block].token_ids != tuple(token_ids[start : start + self.block_tokens]):
                break
            found.append(block)
        return found

    def num_refs(self, block: BlockId) -> int:
        """Return how many hold `block`."""
        return self._num_refs[block]

    def drop_cached(self) -> int:
        """Forget all cached content that nobody holds; returns how many blocks that freed."""
        count = len(self._cached)
        while self._cached:
            self._free.append(self._evict_oldest())
        return count

    def check(self) -> None:
        """Assert every invariant. Cheap enough to run whenever a worker is idle, and after each test step."""
        used = [BlockId(i) for i, refs in enumerate(self._num_refs) if refs > 0]
        assert all(refs >= 0 for refs in self._num_refs), "negative reference count"
        assert self._num_refs[NULL_BLOCK] == 0, "the null block is held"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached and not free & set(used) and not cached & set(used), (
            "a block is in two places"
        )
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is nowhere"
        assert cached <= set(self._content), "a cached block without content"
        assert not free & set(self._content), "a free block with content"
        assert {c.key: b for b, c in self._content.items()} == self._by_key, "keys and contents disagree"

    def _evict_oldest(self) -> BlockId:
        block, _ = self._cached.popitem(last=False)
        del self._by_key[self._content.pop(block).key]
        return block
