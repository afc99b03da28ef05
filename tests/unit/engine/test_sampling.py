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
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    likeliest = order[0]
    if not p.top_k and p.top_p == 1.0:
        order = sorted(order)  # nothing is cut by rank: tokens are gone through by id
    if p.top_k:
        order = order[: p.top_k]
    weights = [np.exp(scaled[i] - scaled[likeliest]) for i in order]
    total = sum(weights)
    kept: list[tuple[int, float]] = []
    mass = 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and mass >= p.top_p:
            break
        kept.append((token, weight / total))
        mass += weight / total
    best = max(w for _, w in kept)
    kept = [(token, weight) for token, weight in kept if weight >= p.min_p * best]
    target, reached = uniform(p.seed, position) * sum(w for _, w in kept), 0.0
    for token, weight in kept:
        reached += weight
        if reached > target:
            return token
    return kept[-1][0]


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


def test_a_nucleus_wider_than_what_is_sorted_first() -> None:
    """A flat distribution over 20,000 tokens: every stage of widening, against the reference."""
    rng = np.random.default_rng(3)
    for top_p in (0.2, 0.9, 0.9999):
        logits = (rng.standard_normal((2, 20_000)) * 0.3).astype(np.float32)
        params = [SamplingParams(top_p=top_p, seed=n) for n in range(2)]
        want = [reference(row, p, 50) for row, p in zip(logits, params, strict=True)]
        assert sample(torch.from_numpy(logits), params, [50, 50]) == want
