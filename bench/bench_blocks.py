"""Block keys and the block pool: what the accounting of one block costs beside hashing its tokens at all."""

import hashlib
import struct

import harness

from phasor.core.identity import block_keys
from phasor.core.ids import BlockKey
from phasor.engine.blocks import BlockPool

NAMESPACE = BlockKey(b"n" * 32)


def bench_keys(num_tokens: int, block_tokens: int, budget_s: float) -> None:
    token_ids = list(range(num_tokens))
    data = struct.pack(f"<{num_tokens}I", *token_ids)
    num_blocks = num_tokens // block_tokens
    keys = harness.measure(
        lambda: block_keys(NAMESPACE, token_ids, block_tokens), num_operations=num_blocks, budget_s=budget_s
    )
    whole = harness.measure(
        lambda: hashlib.sha256(data).digest(), num_operations=num_blocks, budget_s=budget_s
    )
    config = {"num_tokens": num_tokens, "block_tokens": block_tokens}
    harness.report("block_key", config, keys, whole, baseline_name="one SHA-256 over all tokens")


def bench_pool(num_blocks: int, block_tokens: int, budget_s: float) -> None:
    token_ids = list(range(num_blocks * block_tokens))
    keys = block_keys(NAMESPACE, token_ids, block_tokens)
    ids = list(range(num_blocks))

    def sequence_life() -> None:
        pool = BlockPool(num_blocks + 1, block_tokens)
        blocks = pool.allocate(num_blocks)
        for index, block in enumerate(blocks):
            start = index * block_tokens
            pool.register(block, keys[index], token_ids[start : start + block_tokens])
        pool.free_blocks(blocks)
        hit = pool.match(keys, token_ids)
        pool.share(hit)
        pool.free_blocks(hit)

    def copy_ids() -> None:
        {key: block for block, key in zip(ids, keys, strict=True)}

    life = harness.measure(sequence_life, num_operations=num_blocks, budget_s=budget_s)
    copy = harness.measure(copy_ids, num_operations=num_blocks, budget_s=budget_s)
    config = {"num_blocks": num_blocks, "block_tokens": block_tokens}
    harness.report("block_life", config, life, copy, baseline_name="one dict insertion per block")


def main() -> None:
    budget_s = harness.arguments(__doc__ or "").budget_s
    for block_tokens in (16, 64):
        bench_keys(4096, block_tokens, budget_s)
        bench_pool(256, block_tokens, budget_s)


if __name__ == "__main__":
    main()
