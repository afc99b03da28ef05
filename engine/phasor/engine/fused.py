"""Decoder layers with fewer, larger operations: put in place of transformers' own at load, with their weights.

A decode step reads all weights once and does little else, so what counts is how fast they are read and how many
small operations stand between. Families that are not listed here keep transformers' modules and are served as well.
Letters: T tokens of the step, C hidden size, H query heads, G KV heads, D head dim.
"""

from typing import Any, cast

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM

from phasor.engine.attention import StepBinding
from phasor.kernels.linear import linear
from phasor.kernels.paged_attention import paged_attention
from phasor.kernels.rotary import rotate_and_write


class FusedLlamaLayer(nn.Module):
    """A `LlamaDecoderLayer` in six operations; takes over its parameters.

    Args:
        layer: the layer that it replaces. Its q, k, v and gate, up weights are joined, so it is of no use afterwards.
        binding: hands it the running step.
    """

    def __init__(self, layer: nn.Module, binding: StepBinding) -> None:
        super().__init__()
        source = cast(Any, layer)
        attention, mlp = source.self_attn, source.mlp
        self.layer_idx: int = attention.layer_idx
        self.num_heads: int = attention.config.num_attention_heads
        self.num_kv_heads: int = attention.config.num_key_value_heads
        self.head_dim: int = attention.head_dim
        self.scale = float(attention.scaling)
        self.norm_eps = float(source.input_layernorm.variance_epsilon)
        self.input_norm = source.input_layernorm.weight
        self.qkv, self.qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.out_bias = attention.o_proj.weight, attention.o_proj.bias
        self.post_norm = source.post_attention_layernorm.weight
        self.gate_up, _ = _joined(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj.weight
        self._binding = binding

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """Compute the layer for a packed step, `[1, T, C]`; K and V go into the step's pages."""
        context = self._binding.context
        k_pages, v_pages = context.views[self.layer_idx]
        x, cos, sin = hidden_states[0], position_embeddings[0][0], position_embeddings[1][0]
        qkv = linear(x, self.qkv, bias=self.qkv_bias, norm=self.input_norm, norm_eps=self.norm_eps)
        heads = qkv.view(x.shape[0], -1, self.head_dim)
        query, rest = heads[:, : self.num_heads], heads[:, self.num_heads :]
        key, value = rest[:, : self.num_kv_heads], rest[:, self.num_kv_heads :]
        query = rotate_and_write(query, key, value, cos, sin, k_pages, v_pages, context.metadata)
        attended = paged_attention(query, k_pages, v_pages, context.metadata, scale=self.scale)
        x = linear(attended.flatten(1), self.out, bias=self.out_bias, residual=x)
        inner = linear(x, self.gate_up, norm=self.post_norm, norm_eps=self.norm_eps, gated=True)
        return linear(inner, self.down, residual=x)[None]


class FusedHead(nn.Module):
    """The final norm and the output embedding, for the rows that need logits only; logits are float32.

    Args:
        norm: the model's final RMS norm.
        head: its output embedding; the weight may be the input embedding's.
    """

    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.norm_eps = cast(Any, norm).weight, float(cast(Any, norm).variance_epsilon)
        self.weight, self.bias = cast(Any, head).weight, cast(Any, head).bias

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return `[1, T, vocab]` float32 for `[1, T, C]` that were not normalised yet."""
        x = hidden_states[0]
        logits = linear(
            x, self.weight, bias=self.bias, norm=self.norm, norm_eps=self.norm_eps, out_dtype=torch.float32
        )
        return logits[None]


def fuse(module: nn.Module, binding: StepBinding) -> bool:
    """Replace the layers of `module` where their family is known; returns whether it is."""
    whole = cast(Any, module)
    if type(module) is not LlamaForCausalLM or whole.config.hidden_act != "silu" or whole.config.mlp_bias:
        return False
    model = whole.model
    for index, layer in enumerate(model.layers):
        assert type(layer) is LlamaDecoderLayer
        model.layers[index] = FusedLlamaLayer(layer, binding)
    whole.lm_head = FusedHead(model.norm, whole.lm_head)
    model.norm = nn.Identity()
    return True


def _joined(*parts: nn.Linear) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return the parts' weights and biases as one each, and let go of the parts' own."""
    weight = nn.Parameter(torch.cat([part.weight.data for part in parts]), requires_grad=False)
    bias = None
    if parts[0].bias is not None:
        bias = nn.Parameter(torch.cat([part.bias.data for part in parts]), requires_grad=False)
    for part in parts:
        part.weight = part.bias = None  # type: ignore[assignment]
    return weight, bias
