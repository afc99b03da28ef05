"""Fused layers against transformers' own: the same logits, and a sequence's bits whatever it is batched with."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from phasor.core.ids import BlockId
from phasor.engine.attention import StepBinding
from phasor.engine.fused import FusedHead, FusedLlamaLayer, fuse
from phasor.engine.kv import PagedKV
from phasor.engine.model import LoadedModel, load_model
from phasor.engine.runner import ModelRunner, SequenceSlice
from tests.helpers.kernels import natives
from tests.helpers.models import TINY_FOLDER

BLOCK_TOKENS = 8
TEXT = list(b"def merge(left, right):\n    result = []\n    while left and right:\n")
LENGTHS = (5, 8, 17, 40, 60)


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        for module in ("linear", "rotary", "paged_attention"):
            monkeypatch.setattr(f"phasor.kernels.{module}.native_kernels", lambda: None)
    return str(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(Path(TINY_FOLDER), dtype="float32", cache_dir=tmp_path_factory.mktemp("cache"))


def reference(**changes: Any) -> Any:
    config = AutoConfig.from_pretrained(TINY_FOLDER, local_files_only=True)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def decode(model: LoadedModel, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Read prompts of `lengths` one by one, then decode three tokens of each, all together."""
    kv = PagedKV(model.layout_for(BLOCK_TOKENS), 1 + 10 * len(lengths), device="cpu")
    kv.pool[1:].fill_(float("nan"))
    runner = ModelRunner(model, kv)
    tables = [[BlockId(1 + 10 * i + j) for j in range(10)] for i in range(len(lengths))]
    for length, table in zip(lengths, tables, strict=True):
        runner.step([SequenceSlice(TEXT[:length], 0, table, False)])
    rows = []
    for step in range(3):
        slices = [
            SequenceSlice([97 + step], length + step, table, True)
            for length, table in zip(lengths, tables, strict=True)
        ]
        rows.append(runner.step(slices))
    return [torch.stack([row[i] for row in rows]) for i in range(len(lengths))]


def test_every_layer_is_replaced_and_keeps_its_parameters(model: LoadedModel) -> None:
    module: Any = model.module
    layers = list(module.model.layers)
    assert layers and all(type(layer) is FusedLlamaLayer for layer in layers)
    assert type(module.lm_head) is FusedHead
    assert not any(isinstance(part, LlamaDecoderLayer) for part in module.modules())
    plain = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32)
    assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in plain.parameters())


def test_logits_are_transformers(model: LoadedModel, kernels: str) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32)
    for length, got in zip(LENGTHS, decode(model, LENGTHS), strict=True):
        ids = torch.tensor([[*TEXT[:length], 97, 98, 99]])
        with torch.inference_mode():
            want = plain(ids).logits[0, length:]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


def test_a_sequence_has_its_bits_in_any_batch(model: LoadedModel) -> None:
    together = decode(model, LENGTHS)
    for length, got in zip(LENGTHS, together, strict=True):
        (alone,) = decode(model, (length,))
        if natives():
            assert torch.equal(got, alone)
        else:
            torch.testing.assert_close(got, alone, rtol=1e-5, atol=1e-5)


def test_biases_are_kept(kernels: str, tmp_path: Path) -> None:
    plain = reference(attention_bias=True)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    plain.save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path / "model", dtype="float32", cache_dir=tmp_path)
    (got,) = decode(loaded, (17,))
    with torch.inference_mode():
        want = plain(torch.tensor([[*TEXT[:17], 97, 98, 99]])).logits[0, 17:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"mlp_bias": True}], ids=str)
def test_what_it_does_not_know_it_leaves_alone(changes: dict[str, Any]) -> None:
    plain = reference(**changes)
    before = copy.copy(list(plain.model.layers))
    assert not fuse(plain, StepBinding())
    assert list(plain.model.layers) == before
    assert not fuse(nn.Linear(2, 2), StepBinding())
