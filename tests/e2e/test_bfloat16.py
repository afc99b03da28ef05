"""In bfloat16, against transformers in bfloat16 and in float32: the same first token, and a bounded logit error.

The yardstick for the error is transformers' own: rounding to bfloat16 moves its logits by some RMS from float32's,
and Phasor's may not move further than that by more than a quarter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from phasor.core.ids import BlockId
from phasor.engine.kv import PagedKV
from phasor.engine.model import load_model
from phasor.engine.runner import ModelRunner, SequenceSlice
from tests.helpers.prompts import equality_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHUNK = 512
MAX_DIFFERENT = 1
MAX_ERROR_RATIO = 1.25


def reference_logits(
    folder: Path, prompts: dict[str, list[int]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    with torch.inference_mode():
        return {
            name: model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1].float()
            for name, ids in prompts.items()
        }


def phasor_logits(folder: Path, prompts: dict[str, list[int]], cache_dir: Path) -> dict[str, torch.Tensor]:
    model = load_model(folder, dtype="bfloat16", cache_dir=cache_dir)
    kv = PagedKV(model.layout_for(16), 256, device="cpu")
    runner = ModelRunner(model, kv)
    table = [BlockId(i) for i in range(1, 256)]
    found = {}
    for name, ids in prompts.items():
        for start in range(0, len(ids), CHUNK):
            logits = runner.step([SequenceSlice(ids[start : start + CHUNK], start, table, True)])
        found[name] = logits[0]
    return found


def rms(difference: torch.Tensor) -> float:
    return float(difference.double().pow(2).mean().sqrt())


def test_first_token_and_logit_error(
    smollm2_folder: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    prompts = equality_prompts(Tokenizer.from_file(str(smollm2_folder / "tokenizer.json")))
    exact = reference_logits(smollm2_folder, prompts, torch.float32)
    theirs = reference_logits(smollm2_folder, prompts, torch.bfloat16)
    ours = phasor_logits(smollm2_folder, prompts, tmp_path)
    different = [name for name in prompts if int(ours[name].argmax()) != int(theirs[name].argmax())]
    assert len(different) <= MAX_DIFFERENT, different
    our_error = sum(rms(ours[name] - exact[name]) for name in prompts) / len(prompts)
    their_error = sum(rms(theirs[name] - exact[name]) for name in prompts) / len(prompts)
    record_property("mean_rms_logit_error", {"phasor": our_error, "transformers": their_error})
    assert their_error > 0 and our_error <= MAX_ERROR_RATIO * their_error
