"""Sampling: pure in seed and position, right in distribution, and blind to batch mates."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from phasor.core.request import SamplingParams
from phasor.engine.logit_rules import TokenDraw
from phasor.engine.logprobs import likeliest_tokens
from phasor.engine.sampling import sample as sample_tokens
from phasor.engine.sampling import uniform

PAIRS = [(0, 0), (1, 0), (0, 1), (2**63, 5), (2**64 - 1, 8191), (12345, 777)]


def test_uniform_is_the_same_in_every_process() -> None:
    code = f"from phasor.engine.sampling import uniform; print([uniform(s, p) for s, p in {PAIRS}])"
    want = str([uniform(s, p) for s, p in PAIRS])
    for hash_seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=100
        )
        assert done.stdout.strip() == want
    assert len({uniform(s, p) for s, p in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_uniform_is_uniform(over: str) -> None:
    values = np.array([uniform(3, n) if over == "positions" else uniform(n, 3) for n in range(10_000)])
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    chi_square = float(((counts - 200.0) ** 2 / 200.0).sum())
    assert 15 < chi_square < 100, chi_square  # 49 degrees of freedom; fixed inputs, so never flaky


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Token ids only, for draws that differ in parameters and position."""
    draws = [TokenDraw(p, range(n), n) for p, n in zip(params, positions, strict=True)]
    return [token.token_id for token in sample_tokens(logits, draws)]


def reference(logits: np.ndarray, p: SamplingParams, position: int) -> int:
    """The same rule, written by loops over sorted (logit, id) pairs in float64."""
    scaled = ((logits - logits.max()) / np.float32(p.temperature)).astype(np.float64)
    weight = np.exp(scaled)
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = order[: p.top_k or len(order)]
    total = sum(weight[order])
    kept: list[int] = []
    likelier = mass = 0.0
    for rank, token in enumerate(order):
        if rank and weight[token] < weight[order[rank - 1]]:
            likelier = mass
        if rank == 0 or (likelier < p.top_p * total and weight[token] >= p.min_p):
            kept.append(token)
        mass += weight[token]
    if p.top_k or p.top_p < 0.5:
        return inverse(weight, kept, uniform(p.seed, position))
    for attempt in range(12):
        token = inverse(weight, range(len(weight)), uniform(p.seed, position, attempt))
        if token in kept:
            return token
    return inverse(weight, kept, uniform(p.seed, position, 12))


def inverse(weight: np.ndarray, tokens: Sequence[int], u: float) -> int:
    """The token at `u` of the cumulative distribution of `tokens` in their order."""
    target, reached = u * sum(weight[t] for t in tokens), 0.0
    for token in tokens:
        reached += weight[token]
        if reached > target:
            return token
    return tokens[-1]


def random_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.3, 0.8, 1.0, 2.5])),
        top_k=int(rng.choice([0, 1, 2, 7, 1000])),
        top_p=float(rng.choice([1.0, 0.95, 0.5, 0.01])),
        seed=int(rng.integers(2**63)),
        min_p=float(rng.choice([0.0, 0.0, 0.1, 1.0])),
    )


def test_against_an_independent_reference() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows = int(rng.integers(1, 12))
        logits = (rng.standard_normal((rows, int(rng.integers(3, 300)))) * 3).astype(np.float32)
        logits[:, 1] = logits[:, 0]  # a tie in every row
        params = [random_params(rng) for _ in range(rows)]
        positions = [int(n) for n in rng.integers(0, 9000, rows)]
        want = [reference(*row) for row in zip(logits, params, positions, strict=True)]
        assert sample(torch.from_numpy(logits), params, positions) == want


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy((rng.standard_normal((9, 500)) * 2).astype(np.float32))
    params = [random_params(rng) for _ in range(8)] + [SamplingParams(temperature=0.0)]
    positions = list(range(100, 109))
    before = logits.clone()
    together = sample(logits, params, positions)
    assert torch.equal(logits, before), "the logits were modified"
    alone = [sample(logits[i : i + 1], params[i : i + 1], positions[i : i + 1])[0] for i in range(9)]
    assert together == alone
    assert sample(logits.flip(0), params[::-1], positions[::-1]) == together[::-1]


def test_greedy_is_argmax_whatever_else_is_set() -> None:
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(4))
    params = [SamplingParams(temperature=0.0, top_k=3, top_p=0.1, seed=n) for n in range(6)]
    assert sample(logits, params, list(range(6))) == logits.argmax(-1).tolist()
    tied = torch.randint(0, 3, (5, 640), generator=torch.Generator().manual_seed(4)).float()
    assert sample(tied, params[:5], list(range(5))) == tied.argmax(-1).tolist()


def test_top_k_one_and_tiny_top_p_are_argmax() -> None:
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(5))
    for params in (SamplingParams(top_k=1, seed=3), SamplingParams(top_p=1e-9, seed=3)):
        assert sample(logits, [params] * 50, list(range(50))) == logits.argmax(-1).tolist()


def test_frequencies_follow_softmax() -> None:
    num, temperature = 8000, 0.7
    row = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0])
    params = SamplingParams(temperature=temperature, seed=99)
    tokens = sample(row.repeat(num, 1), [params] * num, list(range(num)))
    counts = Counter(tokens)
    for token, share in enumerate((row / temperature).softmax(0).tolist()):
        deviation = (num * share * (1 - share)) ** 0.5
        assert abs(counts[token] - num * share) < 4 * deviation, (token, counts[token], num * share)


CUTS = [
    {"top_p": 0.8},
    {"top_p": 0.3},
    {"min_p": 0.25},
    {"min_p": 0.9},
    {"top_p": 0.7, "min_p": 0.2},
    {"top_k": 3, "top_p": 0.8, "min_p": 0.3},
]


@pytest.mark.parametrize("cuts", CUTS)
def test_cut_distributions_are_transformers_own(cuts: dict[str, float]) -> None:
    """Each token that transformers' own warpers leave gets its share; each other token nothing."""
    from transformers import LogitsProcessorList
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    num, row = 6000, torch.tensor([0.1, 1.0, -1.0, 0.5, 2.0, -3.0, 1.4, 0.9, -0.4])
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    if "top_k" in cuts:
        warpers.append(TopKLogitsWarper(int(cuts["top_k"])))
    if "top_p" in cuts:
        warpers.append(TopPLogitsWarper(cuts["top_p"]))
    if "min_p" in cuts:
        warpers.append(MinPLogitsWarper(cuts["min_p"]))
    shares = warpers(torch.zeros(1, 1, dtype=torch.int64), row[None].clone())[0].softmax(0).tolist()
    params = SamplingParams(temperature=0.8, seed=7, **cuts)  # type: ignore[arg-type]
    counts = Counter(sample(row.repeat(num, 1), [params] * num, list(range(num))))
    for token, share in enumerate(shares):
        deviation = (num * share * (1 - share)) ** 0.5
        assert abs(counts[token] - num * share) <= 4 * deviation, (token, counts[token], num * share)


@pytest.mark.parametrize("vocab_size", [64 * 40, 1000])
@pytest.mark.parametrize("count", [1, 20, 39])
def test_likeliest_tokens_are_in_order_and_ties_too(vocab_size: int, count: int) -> None:
    logits = torch.randint(-40, 40, (5, vocab_size), generator=torch.Generator().manual_seed(7)).float()
    logits[:, 3::7] += torch.rand(5, len(range(3, vocab_size, 7)), generator=torch.Generator().manual_seed(8))
    values, ids = likeliest_tokens(logits, count)
    assert torch.equal(values, logits.topk(count).values) and torch.equal(logits.gather(-1, ids), values)
    for row_values, row_ids in zip(values.tolist(), ids.tolist(), strict=True):
        pairs = [(-value, token) for value, token in zip(row_values, row_ids, strict=True)]
        assert pairs == sorted(pairs)


def test_a_nucleus_of_thousands_of_tokens() -> None:
    """A flat distribution over 20,000 tokens: drawn, and every stage of sorting more, against the reference."""
    rng = np.random.default_rng(3)
    for top_p in (0.2, 0.9, 0.9999):
        logits = (rng.standard_normal((2, 20_000)) * 0.3).astype(np.float32)
        params = [SamplingParams(top_p=top_p, seed=n) for n in range(2)]
        want = [reference(row, p, 50) for row, p in zip(logits, params, strict=True)]
        assert sample(torch.from_numpy(logits), params, [50, 50]) == want
