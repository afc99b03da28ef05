"""Phasor's attention function for transformers: K and V go into pages, and attention reads them there.

transformers calls it for every layer; where the step's tokens belong comes from a context that the runner binds
to the model for the duration of the step, never from keyword arguments (which families pass differ).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface

from phasor.kernels.paged_attention import AttentionMetadata, paged_attention, write_kv

ATTENTION_NAME = "phasor"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """One step: where its tokens go, and the pool's views of each layer."""

    metadata: AttentionMetadata
    views: list[tuple[torch.Tensor, torch.Tensor]]


class StepBinding:
    """Hands the running step's context to a model's attention modules."""

    def __init__(self) -> None:
        self._context: StepContext | None = None

    @property
    def context(self) -> StepContext:
        """The step that runs now."""
        assert self._context is not None, "attention was called outside of a step"
        return self._context

    @contextmanager
    def during(self, context: StepContext) -> Iterator[None]:
        """Bind `context` until the block ends."""
        assert self._context is None, "two steps at once on one model"
        self._context = context
        try:
            yield
        finally:
            self._context = None


def phasor_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend a packed step, `[1, heads, T, dim]` each; returns `[1, T, heads, v_dim]`."""
    layer = cast(Any, module)  # an attention module of transformers, with what `attach` gave it
    context: StepContext = layer.phasor_binding.context
    k_pages, v_pages = context.views[layer.layer_idx]
    write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), k_pages, v_pages, context.metadata)
    out = paged_attention(
        query[0].transpose(0, 1), k_pages, v_pages, context.metadata, scale=float(kwargs["scaling"])
    )
    return out[None], None


def register() -> None:
    """Make the attention function known to transformers under its name; before a model is loaded with it."""
    AttentionInterface.register(ATTENTION_NAME, phasor_attention)


def attach(module: nn.Module) -> StepBinding:
    """Give every attention module of `module` one shared binding, which is returned."""
    binding = StepBinding()
    for part in module.modules():
        if hasattr(part, "layer_idx") and hasattr(part, "q_proj"):
            part.phasor_binding = binding  # type: ignore[assignment]
    return binding
