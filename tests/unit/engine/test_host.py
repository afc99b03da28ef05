"""load_engine: what it refuses at start, and that it leaves the pool as it found it."""

import re
from typing import Any

import pytest
import torch

from phasor.core.config import KVConfig, ModelConfig, WorkerConfig
from phasor.core.errors import ConfigError, InternalError
from phasor.engine.host import load_engine, run_canary
from phasor.engine.runner import ModelRunner
from tests.helpers.models import TINY_FOLDER

BLOCK_BYTES = 16 * 2 * 4 * 2 * 32 * 4  # tokens, K and V, layers, heads, dim, float32


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def config(memory_bytes: int, max_model_len: int | None = None) -> WorkerConfig:
    return WorkerConfig(
        model=ModelConfig(path=str(TINY_FOLDER), max_model_len=max_model_len),
        kv=KVConfig(memory_bytes=memory_bytes),
    )


def test_too_little_memory_names_what_is_needed() -> None:
    needed = (256 // 16 + 1) * BLOCK_BYTES
    with pytest.raises(ConfigError, match=re.escape(f"{needed:,} bytes")) as caught:
        load_engine(config(needed - 1))
    assert caught.value.field == "kv.memory_bytes"
    assert load_engine(config(needed)).pool.num_blocks == 16  # and the null block


def test_less_memory_is_enough_for_shorter_sequences() -> None:
    host = load_engine(config(3 * BLOCK_BYTES, max_model_len=20))
    assert host.max_model_len == 20
    assert host.kv.pool.shape[0] == 3
    assert host.pool.num_blocks == 2


def test_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="256") as caught:
        load_engine(config(2**24, max_model_len=257))
    assert (caught.value.field, caught.value.value) == ("model.max_model_len", 257)


def test_canary_ran_and_left_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = ModelRunner.step

    def counted(self: ModelRunner, slices: Any) -> torch.Tensor:
        steps.append(sum(len(s.token_ids) for s in slices))
        return step(self, slices)

    monkeypatch.setattr(ModelRunner, "step", counted)
    host = load_engine(config(2**24))
    assert steps == [5, 1, 1]
    assert host.pool.num_free == host.pool.num_blocks
    assert host.served_name == TINY_FOLDER.name


def test_canary_fails_on_nan_and_still_frees() -> None:
    host = load_engine(config(2**24))
    free = host.pool.num_free
    with torch.no_grad():
        norms = [p for name, p in host.model.module.named_parameters() if "norm" in name]
        norms[0].fill_(float("nan"))
    with pytest.raises(InternalError, match="NaN"):
        run_canary(host)
    assert host.pool.num_free == free
