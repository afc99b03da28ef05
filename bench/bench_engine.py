"""The engine on one CPU thread: a decode step beside its floor and beside transformers; prefill; attention alone.

Floors are measured in the same run: weights (or KV) once at this thread's read bandwidth, and the flops of a prompt
at the speed of a square matmul. transformers runs as `generate` runs it: its own modules, SDPA, a DynamicCache, one
forward per token; without `generate`'s own bookkeeping, which would only slow it down. Rounds are interleaved.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from phasor.core.ids import BlockId
from phasor.engine.kv import PagedKV
from phasor.engine.model import LoadedModel, load_model
from phasor.engine.model_source import resolve_model
from phasor.engine.runner import ModelRunner, SequenceSlice
from phasor.kernels.native import native_kernels
from phasor.kernels.paged_attention import build_metadata, paged_attention

TINY_FOLDER = harness.REPOSITORY / "tests" / "data" / "tiny-code-256"
BLOCK_TOKENS = 16
BATCHES, CONTEXTS, PROMPT_TOKENS = (1, 8, 32), (128, 1024), 512
GOAL_OVER_TRANSFORMERS = {1: 1 / 1.4, 8: 1 / 2.5}
GOAL_ATTENTION = 3.0
READ_SHAPE, MATMUL_SIZE = (8192, 8192), 1024


class Floors:
    """What this thread reads and multiplies per second, measured anew for every row."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._block = torch.ones(READ_SHAPE)
        self._vector = torch.ones(READ_SHAPE[1])
        self._square = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype)

    def bytes_per_s(self) -> float:
        """Return the best of three ways to read 256 MB: as one stream, as 32, and as a matrix times a vector."""
        ways: dict[str, Callable[[], object]] = {
            "one": self._block.sum,
            "many": lambda: self._block.view(32, -1).sum(0),
            "matrix": lambda: torch.mv(self._block, self._vector),
        }
        found = harness.measure_interleaved(ways, budget_s=0.0, min_runs=3)
        return self._block.nbytes / min(spread.p20_s for spread in found.values())

    def flops_per_s(self) -> float:
        """Return the speed of a square matmul."""
        spread = harness.measure(
            lambda: self._square @ self._square, num_operations=1, budget_s=0.0, min_runs=5
        )
        return float(2 * MATMUL_SIZE**3 / spread.p20_s)


class Bench:
    """Both engines with one model in one dtype, and the parts of a row that are the same for all of them."""

    def __init__(self, folder: Path, dtype: str, budget_s: float) -> None:
        self.model: LoadedModel = load_model(folder, dtype=dtype)
        self.layout = self.model.layout_for(BLOCK_TOKENS)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.floors = Floors(self.dtype)
        self._peer: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype).eval()
        self._budget_s = budget_s
        # Tied embeddings are one parameter: it is read once per step, as the output embedding.
        self.weight_bytes = sum(p.nbytes for p in self._peer.parameters())
        native = native_kernels()
        self.config = {
            "model": folder.name,
            "dtype": dtype,
            "num_threads": torch.get_num_threads(),
            "block_tokens": BLOCK_TOKENS,
            "kernels": native.isa.name.lower() if native else "torch",
        }

    def decode(self, batch: int, context: int) -> None:
        """Time steps that decode one token for each of `batch` sequences with `context` tokens behind it."""
        runner, tables = self._runner(batch, context + 1)
        slices = [SequenceSlice([7 + i], context, table, True) for i, table in enumerate(tables)]
        kv_bytes = batch * context * self.layout.token_bytes
        runs = {"phasor": lambda: runner.step(slices), "transformers": self._peer_step(batch, context)}
        spreads = harness.measure_interleaved(runs, budget_s=self._budget_s)
        bytes_per_s = self.floors.bytes_per_s()
        config = {
            **self.config,
            "batch": batch,
            "context": context,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": int(kv_bytes),
            "gb_per_s": round(bytes_per_s / 1e9, 2),
        }
        ours, floor_s = spreads["phasor"], self.weight_bytes / bytes_per_s
        for name, baseline, goal in (
            ("transformers", spreads["transformers"], GOAL_OVER_TRANSFORMERS.get(batch)),
            ("weights once at read bandwidth", harness.constant(floor_s), None),
            (
                "weights and KV once at read bandwidth",
                harness.constant(floor_s + kv_bytes / bytes_per_s),
                None,
            ),
        ):
            harness.report("decode_step", config, ours, baseline, baseline_name=name, goal_ratio=goal)

    def prefill(self, num_tokens: int) -> None:
        """Time one prompt chunk; an operation is one token."""
        runner, tables = self._runner(1, num_tokens)
        token_ids = [n % self.model.vocab_size for n in range(num_tokens)]
        whole, ids = [SequenceSlice(token_ids, 0, tables[0], True)], torch.tensor([token_ids])

        @torch.inference_mode()
        def peer() -> None:
            self._peer(input_ids=ids, use_cache=True, logits_to_keep=1)

        runs = {"phasor": lambda: runner.step(whole), "transformers": peer}
        spreads = harness.measure_interleaved(runs, budget_s=self._budget_s, min_runs=3)
        ours, theirs = spreads["phasor"].per(num_tokens), spreads["transformers"].per(num_tokens)
        flops_per_s = self.floors.flops_per_s()
        # The output embedding is computed for one token only; the input embedding is not computed at all.
        num_parameters = sum(p.numel() for p in self._peer.model.layers.parameters())
        floor = harness.constant(2 * num_parameters / flops_per_s)
        config = {
            **self.config,
            "num_tokens": num_tokens,
            "tokens_per_s": round(1 / ours.p50_s, 1),
            "gflops_per_s": round(flops_per_s / 1e9),
        }
        harness.report("prefill_token", config, ours, theirs, baseline_name="transformers")
        harness.report("prefill_token", config, ours, floor, baseline_name="flops at a square matmul's speed")

    def attention(self, batch: int, context: int) -> None:
        """Time one step's attention of all layers, without anything around it."""
        kv = self._filled_pool(batch * self.layout.num_blocks_for(context) + 1)
        tables = list(_tables(batch, self.layout.num_blocks_for(context)))
        metadata = build_metadata([context - 1] * batch, [1] * batch, tables, BLOCK_TOKENS, "cpu")
        views = [kv.layer_views(layer) for layer in range(self.layout.num_layers)]
        num_heads = int(self.model.config.num_attention_heads)
        query = torch.randn(batch, num_heads, self.layout.k_dim).to(self.dtype)

        @torch.inference_mode()
        def run() -> None:
            for k, v in views:
                paged_attention(query, k, v, metadata, scale=self.layout.k_dim**-0.5)

        spread = harness.measure(run, num_operations=1, budget_s=self._budget_s)
        bytes_per_s = self.floors.bytes_per_s()
        kv_bytes = int(batch * context * self.layout.token_bytes)
        config = {
            **self.config,
            "batch": batch,
            "context": context,
            "kv_bytes": kv_bytes,
            "gb_per_s": round(bytes_per_s / 1e9, 2),
        }
        floor = harness.constant(kv_bytes / bytes_per_s)
        name = "KV once at read bandwidth"
        harness.report(
            "paged_attention", config, spread, floor, baseline_name=name, goal_ratio=GOAL_ATTENTION
        )

    def _runner(self, batch: int, num_tokens: int) -> tuple[ModelRunner, list[list[BlockId]]]:
        num_blocks = self.layout.num_blocks_for(num_tokens)
        kv = self._filled_pool(batch * num_blocks + 1)
        return ModelRunner(self.model, kv), list(_tables(batch, num_blocks))

    def _filled_pool(self, num_blocks: int) -> PagedKV:
        kv = PagedKV(self.layout, num_blocks, device="cpu")
        kv.pool.normal_(std=0.3)
        return kv

    def _peer_step(self, batch: int, context: int) -> Callable[[], object]:
        cache = DynamicCache(config=self._peer.config)
        shape = (batch, self.layout.num_kv_heads, context, self.layout.k_dim)
        for layer in range(self.layout.num_layers):
            k, v = (torch.randn(shape).mul(0.3).to(self.dtype) for _ in range(2))
            cache.update(k, v, layer)
        ids = torch.arange(7, 7 + batch)[:, None] % self.model.vocab_size

        @torch.inference_mode()
        def step() -> None:
            # The cache grows by one token a step, as in `generate`: at most some percent in a run.
            self._peer(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)

        return step


def _tables(batch: int, num_blocks: int) -> Iterator[list[BlockId]]:
    """Shuffled: a pool that has been in use for a while."""
    ids = [BlockId(n) for n in range(1, batch * num_blocks + 1)]
    random.Random(7).shuffle(ids)
    for first in range(0, len(ids), num_blocks):
        yield ids[first : first + num_blocks]


def main() -> None:
    arguments = harness.arguments(__doc__ or "")
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    folder = TINY_FOLDER if arguments.smoke else resolve_model("smollm2")
    batches, contexts = ((1, 2), (24,)) if arguments.smoke else (BATCHES, CONTEXTS)
    for dtype in ("float32", "bfloat16"):
        bench = Bench(folder, dtype, arguments.budget_s)
        for context in contexts:
            for batch in batches:
                bench.decode(batch, context)
                bench.attention(batch, context)
        bench.prefill(24 if arguments.smoke else PROMPT_TOKENS)


if __name__ == "__main__":
    main()
