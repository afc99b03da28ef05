"""Loads a Hugging Face causal LM and injects Phasor's attention and rotary; refuses what it would serve wrongly.

In this version: the llama family with default rope.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from phasor.core.errors import ConfigError, UnsupportedModelError
from phasor.core.identity import NUMERICS_VERSION, Identity
from phasor.engine.attention import ATTENTION_NAME, StepBinding, attach, register
from phasor.engine.fused import fuse
from phasor.engine.pages import PageLayout
from phasor.engine.rope import PhasorRotary, RopeSchedule
from phasor.engine.weights import weights_digest

SERVED_MODEL_TYPES = ("llama",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready for `ModelRunner`."""

    module: nn.Module
    config: Any
    """The Hugging Face config."""
    rope: RopeSchedule
    binding: StepBinding
    weights_digest: str
    eos_token_ids: frozenset[int]
    dtype: str
    device: str

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        """Longest sequence that the rope schedule allows."""
        return self.rope.max_positions

    def layout_for(self, block_tokens: int) -> PageLayout:
        """Return the page layout of this model's one layer group."""
        return PageLayout(
            num_layers=int(self.config.num_hidden_layers),
            num_kv_heads=int(self.config.num_key_value_heads),
            k_dim=self.rope.head_dim,
            v_dim=self.rope.head_dim,
            block_tokens=block_tokens,
            dtype=self.dtype,
        )

    def identity(self, block_tokens: int, *, tier: float = 1.0) -> Identity:
        """Return what another worker must share with this one to exchange KV."""
        layout = self.layout_for(block_tokens)
        return Identity(
            weights_digest=self.weights_digest,
            adapter_digest="",
            k_dtype=self.dtype,
            v_dtype=self.dtype,
            layers=tuple(range(layout.num_layers)),
            num_kv_heads=layout.num_kv_heads,
            k_dim=layout.k_dim,
            v_dim=layout.v_dim,
            block_tokens=block_tokens,
            retention="full",
            rope_fingerprint=self.rope.fingerprint(),
            tier=tier,
            position_basis="absolute",
            numerics_version=NUMERICS_VERSION,
            tenant_salt="",
        )


def load_model(
    folder: Path,
    *,
    dtype: str,
    device: str = "cpu",
    cache_dir: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> LoadedModel:
    """Load the model in `folder`. Blocks for seconds.

    Args:
        folder: config.json and *.safetensors.
        dtype: "float32", "bfloat16" or "float16".
        device: "cpu" or "cuda".
        cache_dir: where weight digests are remembered; the user's cache by default.
        progress: called with bytes as the digest reads them.

    Raises:
        ConfigError: the folder or a file in it is missing or damaged.
        UnsupportedModelError: a feature that would be served wrongly, by name.
    """
    config = _read_config(folder)
    rope = _check_served(config)
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(
            "model.path", str(folder), "has no *.safetensors; save the model with safe serialization"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device", device, "torch sees no CUDA device here; use --device cpu")
    module = _read_weights(folder, config, dtype, device)
    binding = attach(module)
    fuse(module, binding)
    _replace_rotary(module, rope)
    return LoadedModel(
        module=module,
        config=config,
        rope=rope,
        binding=binding,
        weights_digest=weights_digest(folder, cache_dir=cache_dir or default_cache_dir(), progress=progress),
        eos_token_ids=_eos_token_ids(folder, config),
        dtype=dtype,
        device=device,
    )


def default_cache_dir() -> Path:
    """Return the user's cache directory for Phasor."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phasor"


def _read_config(folder: Path) -> Any:
    if not folder.is_dir():
        raise ConfigError(
            "model.path", str(folder), "is not a folder; give a folder, a short name or a Hub id"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "model.path", str(folder), "has no config.json; give the folder of a Hugging Face model"
        )
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ConfigError("model.path", str(folder / "config.json"), f"is not JSON: {exc}") from exc
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if model_type not in SERVED_MODEL_TYPES:
        hint = f"is not served yet; served model types: {', '.join(SERVED_MODEL_TYPES)}"
        raise UnsupportedModelError("model_type", model_type, hint)
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _check_served(config: Any) -> RopeSchedule:
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            "quantization_config", "present", "quantised checkpoints are not served yet"
        )
    if getattr(config, "sliding_window", None):
        raise UnsupportedModelError(
            "sliding_window", config.sliding_window, "sliding windows are not served yet"
        )
    return RopeSchedule.from_config(config)


def _read_weights(folder: Path, config: Any, dtype: str, device: str) -> nn.Module:
    register()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as exc:  # safetensors and transformers raise a dozen unrelated types for a damaged file
        hint = f"the weights cannot be loaded ({type(exc).__name__}: {exc}); fetch or save the model again"
        raise ConfigError("model.path", str(folder), hint) from exc
    missing = sorted(report["missing_keys"])
    if missing:
        hint = f"the weights lack {len(missing)} tensors, e.g. {missing[0]}; fetch or save the model again"
        raise ConfigError("model.path", str(folder), hint)
    loaded: nn.Module = module.to(device).eval()
    return loaded


def _replace_rotary(module: nn.Module, rope: RopeSchedule) -> None:
    replaced = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if "Rotary" in type(child).__name__:
                setattr(parent, name, PhasorRotary(rope))
                replaced += 1
    if replaced != 1:
        raise UnsupportedModelError("rotary modules", replaced, "expected exactly one in a llama model")


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    found: Any = None
    generation = folder / "generation_config.json"
    if generation.is_file():
        found = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
