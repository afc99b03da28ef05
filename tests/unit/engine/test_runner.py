"""Greedy decoding through the runner, token for token against transformers, however the prompt was cut."""

import random
from pathlib import Path

import pytest
import torch

from phasor.core.ids import NULL_BLOCK, BlockId
from phasor.engine.kv import PagedKV
from phasor.engine.model import LoadedModel, load_model
from phasor.engine.runner import ModelRunner, SequenceSlice
from tests.helpers.models import TINY_FOLDER
from tests.helpers.reference import GreedyReference, assert_tokens_equal

NUM_NEW = 24
NUM_BLOCKS = 80
BLOCK_TOKENS = 8
TEXT = (
    "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] < right[0]:\n"
    * 3
)
PROMPTS = {f"p{n}": list(TEXT.encode())[-n:] for n in (1, 7, 8, 9, 65, 150)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(Path(TINY_FOLDER), dtype="float32", cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def references(poisoned_torch: None) -> dict[str, GreedyReference]:
    return GreedyReference.of_prompts(TINY_FOLDER, PROMPTS, num_new=NUM_NEW)


@pytest.fixture
def kv(model: LoadedModel) -> PagedKV:
    """A pool of NaN but for the null block."""
    kv = PagedKV(model.layout_for(BLOCK_TOKENS), NUM_BLOCKS, device="cpu")
    kv.pool[1:].fill_(float("nan"))
    return kv


class Sequence:
    """One prompt and its shuffled blocks."""

    def __init__(self, name: str, free: list[BlockId]) -> None:
        self.name, self.tokens, self.num_computed = name, list(PROMPTS[name]), 0
        self.prompt_len = len(self.tokens)
        self.blocks = [free.pop() for _ in range(-(-(self.prompt_len + NUM_NEW) // BLOCK_TOKENS))]

    @property
    def reply(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def next_slice(self, chunk: int) -> SequenceSlice:
        end = min(len(self.tokens), self.num_computed + chunk)
        part = self.tokens[self.num_computed : end]
        return SequenceSlice(part, self.num_computed, self.blocks, end == len(self.tokens))


def shuffled_blocks() -> list[BlockId]:
    free = [BlockId(n) for n in range(1, NUM_BLOCKS)]
    random.Random(7).shuffle(free)
    return free


def generate(runner: ModelRunner, sequences: list[Sequence], chunk: int) -> int:
    """Run all sequences to the end; returns in how many steps prompt chunks and decode tokens met."""
    num_mixed = 0
    while running := [s for s in sequences if len(s.reply) < NUM_NEW]:
        slices = [s.next_slice(chunk) for s in running]
        num_mixed += len({len(part.token_ids) == 1 for part in slices}) == 2
        logits = runner.step(slices)
        rows = iter(logits)
        assert logits.shape[0] == sum(part.needs_logits for part in slices)
        for sequence, part in zip(running, slices, strict=True):
            sequence.num_computed += len(part.token_ids)
            if part.needs_logits:
                sequence.tokens.append(int(next(rows).argmax()))
    return num_mixed


@pytest.mark.parametrize("chunk", [1000, 7, 64], ids=["one-shot", "by-7", "by-64"])
def test_equal_alone(
    model: LoadedModel, kv: PagedKV, references: dict[str, GreedyReference], chunk: int
) -> None:
    runner, free = ModelRunner(model, kv), shuffled_blocks()
    for name in PROMPTS:
        sequence = Sequence(name, free)
        generate(runner, [sequence], chunk)
        assert_tokens_equal(name, references[name], sequence.reply)
    assert not kv.pool[NULL_BLOCK].any(), "the null block was written"


@pytest.mark.parametrize("chunk", [7, 64])
def test_equal_in_one_batch(
    model: LoadedModel, kv: PagedKV, references: dict[str, GreedyReference], chunk: int
) -> None:
    free = shuffled_blocks()
    sequences = [Sequence(name, free) for name in PROMPTS]
    assert generate(ModelRunner(model, kv), sequences, chunk) > 0, "no step was mixed"
    for sequence in sequences:
        assert_tokens_equal(sequence.name, references[sequence.name], sequence.reply)
    assert not kv.pool[NULL_BLOCK].any(), "the null block was written"


def test_no_logits_where_none_are_needed(model: LoadedModel, kv: PagedKV) -> None:
    runner = ModelRunner(model, kv)
    logits = runner.step([SequenceSlice([1, 2, 3], 0, [BlockId(4)], False)])
    assert logits.shape == (0, model.vocab_size)
    assert logits.dtype == torch.float32
    assert torch.isfinite(kv.layer_views(3)[0][4, :, :3]).all(), "the KV was not written"
    assert kv.layer_views(3)[0][4, :, 3:].isnan().all(), "more was written than the tokens"


def test_only_own_blocks_are_written(model: LoadedModel, kv: PagedKV) -> None:
    ModelRunner(model, kv).step([SequenceSlice(list(range(12)), 0, [BlockId(9), BlockId(3)], True)])
    touched = (~kv.pool.isnan()).flatten(1).any(1).nonzero().flatten().tolist()
    assert touched == [0, 3, 9]
