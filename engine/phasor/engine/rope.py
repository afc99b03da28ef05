"""Rope without tables: frequencies from a config, angles computed for each step's tokens (DESIGN section 4).

In this version: the default schedule. Anything else is refused by name.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phasor.core.errors import UnsupportedModelError

_KNOWN_KEYS = {"rope_type", "type", "rope_theta"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSchedule:
    """One rope schedule: which frequencies and magnitudes a tier has, and how far the model was trained."""

    scheme: str
    theta: float
    head_dim: int
    rotary_dim: int
    trained_positions: int
    max_positions: int

    @classmethod
    def from_config(cls, config: Any) -> "RopeSchedule":
        """Read a Hugging Face config.

        Raises:
            UnsupportedModelError: a scheme or key that is not served, by name.
        """
        parameters = dict(getattr(config, "rope_parameters", None) or {})
        if any(isinstance(value, dict) for value in parameters.values()):
            raise UnsupportedModelError(
                "rope_parameters", sorted(parameters), "per-layer-type rope is not served yet"
            )
        scheme = parameters.get("rope_type") or parameters.get("type")
        if scheme != "default":
            hint = "only default rope is served in this version; use a checkpoint without rope scaling"
            raise UnsupportedModelError("rope_parameters.rope_type", scheme, hint)
        unknown = sorted(set(parameters) - _KNOWN_KEYS)
        if unknown:
            hint = f"rope_type 'default' has no key {unknown[0]!r}"
            raise UnsupportedModelError(f"rope_parameters.{unknown[0]}", parameters[unknown[0]], hint)
        if "rope_theta" not in parameters:
            raise UnsupportedModelError(
                "rope_parameters.rope_theta", None, "is missing for rope_type 'default'"
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        positions = int(config.max_position_embeddings)
        return cls(
            scheme="default",
            theta=float(parameters["rope_theta"]),
            head_dim=int(head_dim),
            rotary_dim=int(head_dim),
            trained_positions=positions,
            max_positions=positions,
        )

    def inv_freq(self, tier: float) -> torch.Tensor:
        """Return `[rotary_dim / 2]` float32 frequencies; the same arithmetic as transformers, bit for bit.

        Source: RoFormer, arXiv:2104.09864, section 3.2.2: w_i = theta^(-2i/r).
        """
        self._check_tier(tier)
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        return 1.0 / (self.theta**exponents)

    def mscale(self, tier: float) -> float:
        """Return the magnitude that cos and sin carry, once."""
        self._check_tier(tier)
        return 1.0

    def softmax_scale(self, tier: float) -> float:
        """Return the factor on the model's own softmax scale."""
        self._check_tier(tier)
        return 1.0

    def fingerprint(self) -> str:
        """Return a hash of the effective result, not of the config's text: equal meaning, equal fingerprint."""
        digest = hashlib.sha256(b"phasor-rope-v1")
        frequencies = ",".join(f"{value:.10g}" for value in self.inv_freq(1.0).tolist())
        parts = (
            f"scheme-rule=fixed;offset=0;rotary_dim={self.rotary_dim};head_dim={self.head_dim}",
            "pairing=half-split;nope=;magnitude=1;softmax=1",
            frequencies,
        )
        for part in parts:
            digest.update(struct.pack("<Q", len(part)) + part.encode())
        return digest.hexdigest()

    def _check_tier(self, tier: float) -> None:
        assert tier == 1.0, f"default rope has tier 1 only, got {tier}"


class PhasorRotary(nn.Module):
    """Replaces a model's rotary module: cos and sin of the step's tokens, each at its own tier.

    The arithmetic is the one that models are trained and served with: float32 position times float32 frequency,
    float32 cos and sin, magnitude once, then the activation dtype. Nothing is a registered buffer, so that
    `model.to(bfloat16)` cannot touch the frequencies.
    """

    def __init__(self, schedule: RopeSchedule) -> None:
        super().__init__()
        self._schedule = schedule
        self._rows: dict[float, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, `[1, T, rotary_dim]` in x's dtype, for `[1, T]` positions."""
        row = self._rows.get(1.0)
        if row is None or row.device != x.device:
            row = self._rows[1.0] = self._schedule.inv_freq(1.0).to(x.device)
        angles = position_ids[..., None].float() * row
        angles = torch.cat((angles, angles), dim=-1)
        magnitude = self._schedule.mscale(1.0)
        return (angles.cos() * magnitude).to(x.dtype), (angles.sin() * magnitude).to(x.dtype)
