"""Computes one step: packed tokens of many sequences in, logits where they are needed out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phasor.core.ids import BlockId
from phasor.engine.attention import StepContext
from phasor.engine.kv import PagedKV
from phasor.engine.model import LoadedModel
from phasor.kernels.paged_attention import build_metadata


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The part of one sequence that a step computes."""

    token_ids: Sequence[int]
    start: int
    """Position of the first of `token_ids`; the KV of all positions before it is in the blocks."""
    block_table: Sequence[BlockId]
    needs_logits: bool
    """Of the last token."""
    tier: float = 1.0
    all_logits: bool = False
    """Of every token, not only of the last."""


class ModelRunner:
    """Runs a loaded model over a paged pool. One thread at a time.

    Args:
        model: the loaded model.
        kv: its pool.
    """

    def __init__(self, model: LoadedModel, kv: PagedKV) -> None:
        self._model, self._kv = model, kv
        self._views = [kv.layer_views(layer) for layer in range(kv.layout.num_layers)]

    @torch.inference_mode()
    def step(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Compute the slices' tokens, writing their KV into their blocks.

        Returns:
            `[n, vocab]` float32, in order of the slices: the logits after the last token of each slice with
            needs_logits, and after every token of each slice with all_logits.
        """
        device = self._model.device
        tokens = [token for s in slices for token in s.token_ids]
        # Positions and slots come from this one counter: slice.start.
        positions = [p for s in slices for p in range(s.start, s.start + len(s.token_ids))]
        metadata = build_metadata(
            [s.start for s in slices],
            [len(s.token_ids) for s in slices],
            [s.block_table for s in slices],
            self._kv.layout.block_tokens,
            device,
        )
        ends: list[int] = []
        end = 0
        for s in slices:
            start, end = end, end + len(s.token_ids)
            if s.all_logits:
                ends.extend(range(start, end))
            elif s.needs_logits:
                ends.append(end - 1)
        with self._model.binding.during(StepContext(metadata=metadata, views=self._views)):
            logits = self._model.module(
                input_ids=torch.tensor([tokens], dtype=torch.int64, device=device),
                position_ids=torch.tensor([positions], dtype=torch.int64, device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(ends or [end - 1], dtype=torch.int64, device=device),
            ).logits
        result: torch.Tensor = logits[0].float()
        return result if ends else result[:0]
