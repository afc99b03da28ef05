"""Rope angles bit for bit against transformers, and every schedule that is not served refused by name."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from phasor.core.errors import UnsupportedModelError
from phasor.engine.rope import PhasorRotary, RopeSchedule


class Config:
    """Only what RopeSchedule reads, so that a test says exactly what the parameters are."""

    def __init__(self, parameters: dict[str, Any] | None, head_dim: int = 32) -> None:
        self.rope_parameters, self.head_dim = parameters, head_dim
        self.max_position_embeddings = 8192


def schedule(theta: float = 10000.0, head_dim: int = 32, key: str = "rope_type") -> RopeSchedule:
    return RopeSchedule.from_config(Config({key: "default", "rope_theta": theta}, head_dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 32), (100000.0, 64), (500000.0, 128)])
@pytest.mark.parametrize("order", ["rising", "packed"])
def test_bit_equal_to_transformers(theta: float, head_dim: int, dtype: torch.dtype, order: str) -> None:
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    positions = torch.arange(8192)
    if order == "packed":
        positions = positions[torch.randperm(8192, generator=torch.Generator().manual_seed(1))]
        positions = torch.cat((positions[:3000], torch.tensor([0, 8191, 0, 17, 17])))
    x = torch.zeros(1, 1, dtype=dtype)
    want = LlamaRotaryEmbedding(config)(x, positions[None])
    got = PhasorRotary(RopeSchedule.from_config(config))(x, positions[None])
    for name, ours, theirs in zip(("cos", "sin"), got, want, strict=True):
        assert ours.dtype == dtype and ours.shape == (1, len(positions), head_dim)
        assert torch.equal(ours, theirs), name


def test_frequencies_survive_a_cast_of_the_model() -> None:
    rotary = PhasorRotary(schedule())
    x, positions = torch.zeros(1, 1), torch.arange(4000, 4096)[None]
    before = rotary(x, positions)
    after = rotary.to(torch.bfloat16)(x, positions)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert not list(rotary.buffers()) and not list(rotary.parameters())


def test_fingerprint_is_of_the_meaning() -> None:
    assert schedule().fingerprint() == schedule(key="type").fingerprint()
    assert schedule().fingerprint() == schedule().fingerprint()
    prints = {schedule(t, d).fingerprint() for t in (10000.0, 10001.0, 500000.0) for d in (32, 64)}
    assert len(prints) == 6


@pytest.mark.parametrize("scheme", ["yarn", "linear", "dynamic", "llama3", "longrope", "made-up"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_schemes_are_refused(scheme: str, key: str) -> None:
    parameters = {key: scheme, "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(UnsupportedModelError, match=scheme):
        RopeSchedule.from_config(Config(parameters))


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "rope_theta": 1e4, "mystery": 1}, "mystery"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"full_attention": {"rope_type": "default", "rope_theta": 1e4}}, "full_attention"),
        ({}, "rope_type"),
        (None, "rope_type"),
    ],
)
def test_other_keys_are_refused(parameters: dict[str, Any] | None, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        RopeSchedule.from_config(Config(parameters))
