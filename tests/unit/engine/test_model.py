"""Loading a model: the numbers that follow from it, and everything that is refused, by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phasor.core.errors import ConfigError, UnsupportedModelError
from phasor.engine.model import LoadedModel, load_model
from phasor.engine.rope import PhasorRotary
from tests.helpers.models import TINY_FOLDER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_FOLDER, tmp_path / "model"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(TINY_FOLDER, dtype="float32", cache_dir=tmp_path_factory.mktemp("cache"))


def load(folder: Path, tmp_path: Path, **options: str) -> LoadedModel:
    return load_model(folder, **{"dtype": "float32", **options}, cache_dir=tmp_path / "cache")


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*is not a folder"):
        load(tmp_path / "nowhere", tmp_path)


def test_missing_config(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load(folder, tmp_path)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00"])
def test_config_is_not_json(folder: Path, tmp_path: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match="is not JSON"):
        load(folder, tmp_path)


@pytest.mark.parametrize("model_type", ["mistral", "gemma3", "made-up", None])
def test_other_model_types(folder: Path, tmp_path: Path, model_type: str | None) -> None:
    edit(folder, model_type=model_type)
    with pytest.raises(UnsupportedModelError, match="llama") as caught:
        load(folder, tmp_path)
    assert (caught.value.field, caught.value.value) == ("model_type", model_type)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "linear"),
    ],
)
def test_other_features(folder: Path, tmp_path: Path, values: dict[str, Any], named: str) -> None:
    edit(folder, **values)
    with pytest.raises(UnsupportedModelError, match=named):
        load(folder, tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 500, 100_000])
def test_truncated_weights(folder: Path, tmp_path: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"cannot be loaded.*fetch or save the model again"):
        load(folder, tmp_path)


def test_missing_tensors(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 tensors, e\.g\. model\.layers\.2\.mlp\.up_proj\.weight"):
        load(folder, tmp_path)


def test_no_safetensors(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        load(folder, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        load(folder, tmp_path, device="cuda")


def test_attention_outside_of_a_step(tiny: LoadedModel) -> None:
    with pytest.raises(AssertionError, match="outside of a step"), torch.inference_mode():
        tiny.module(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)


@pytest.mark.parametrize(
    ("in_generation", "in_config", "want"),
    [(7, 3, {7}), ([7, 9], 3, {7, 9}), (None, 3, {3}), (None, None, set())],
)
def test_eos_ids(folder: Path, tmp_path: Path, in_generation: Any, in_config: Any, want: set[int]) -> None:
    edit(folder, eos_token_id=in_config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert load(folder, tmp_path).eos_token_ids == want


def test_numbers(tiny: LoadedModel) -> None:
    assert (tiny.vocab_size, tiny.max_positions) == (256, 256)
    assert tiny.layout_for(16).token_bytes == 2 * 4 * 2 * 32 * 4
    assert not tiny.module.training
    assert sum(isinstance(m, PhasorRotary) for m in tiny.module.modules()) == 1


def test_identity_differs_where_kv_does(folder: Path, tmp_path: Path, tiny: LoadedModel) -> None:
    base = tiny.identity(16)
    assert base == load(folder, tmp_path).identity(16), "a copy is the same model"
    assert base.namespace() != tiny.identity(32).namespace()
    half = load(folder, tmp_path, dtype="bfloat16")
    assert base.namespace() != half.identity(16).namespace()
    assert half.layout_for(16).token_bytes == 2 * 4 * 2 * 32 * 2
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    other = load(folder, tmp_path).identity(16)
    assert other.weights_digest != base.weights_digest and other.namespace() != base.namespace()
