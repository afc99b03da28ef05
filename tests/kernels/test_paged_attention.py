"""Paged attention and KV writes against a float64 reference, with NaN in everything that must not be read."""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from phasor.kernels.paged_attention import build_metadata, paged_attention, write_kv

NAN = float("nan")


@pytest.fixture(params=["native", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both paths of the dispatch; where there is no compiler they are one."""
    if request.param == "torch":
        monkeypatch.setattr("phasor.kernels.paged_attention.native_kernels", lambda: None)
    return str(request.param)


LAYOUTS = [  # groups, heads per group, k_dim, v_dim, block_tokens
    (2, 1, 8, 8, 4),
    (2, 3, 12, 20, 5),
    (1, 2, 16, 6, 16),
    (3, 2, 7, 7, 1),
]
STEPS = {  # (start, count) per sequence
    "one-token": [(0, 1)],
    "decode": [(0, 1), (3, 1), (4, 1), (5, 1), (40, 1), (15, 1)],
    "prompt": [(0, 17)],
    "prompt-two": [(0, 2)],
    "chunk": [(9, 6)],
    "chunk-at-edge": [(20, 5)],
    "mixed": [(7, 1), (0, 13), (31, 1), (11, 4), (0, 1), (16, 16)],
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@dataclass
class Step:
    """A step over a pool that is NaN except for the null block and what the sequences have written."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    tables: list[list[int]]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_step(
    sequences: list[tuple[int, int]], layout: tuple[int, int, int, int, int], dtype: torch.dtype
) -> Step:
    groups, _, k_dim, v_dim, block_tokens = layout
    used = [-(-(start + count) // block_tokens) for start, count in sequences]
    ids = random.Random(5).sample(range(1, 2 * sum(used) + 4), sum(used))
    # One pool, with a gap of NaN between the K and V tiles: both views are strided, as in the engine.
    num_blocks, width = 2 * sum(used) + 4, block_tokens * (k_dim + v_dim) + 3
    pool = torch.full((num_blocks, groups, width), NAN, dtype=dtype)
    pool[0] = 0
    k_pages = pool[:, :, : block_tokens * k_dim].view(num_blocks, groups, block_tokens, k_dim)
    v_pages = pool[:, :, -block_tokens * v_dim :].view(num_blocks, groups, block_tokens, v_dim)
    generator = torch.Generator().manual_seed(11)
    step = Step(k_pages, v_pages, [], [], [])
    taken = iter(ids)
    for (start, count), num_used in zip(sequences, used, strict=True):
        table = list(itertools.islice(taken, num_used))
        k = torch.randn(start + count, groups, k_dim, generator=generator).to(dtype)
        v = torch.randn(start + count, groups, v_dim, generator=generator).to(dtype)
        for position in range(start):
            block, offset = table[position // block_tokens], position % block_tokens
            k_pages[block, :, offset], v_pages[block, :, offset] = k[position], v[position]
        # Tables are longer than the sequence in practice: blocks are reserved ahead.
        step.tables.append([*table, num_blocks - 1])
        step.keys.append(k)
        step.values.append(v)
    return step


def expected(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """Attention of one sequence, token by token and head by head, in float64."""
    query, k, v = query.double(), k.double(), v.double()
    per_group = query.shape[1] // k.shape[1]
    out = torch.zeros(query.shape[0], query.shape[1], v.shape[-1], dtype=torch.float64)
    for row in range(query.shape[0]):
        length = start + row + 1
        for head in range(query.shape[1]):
            scores = k[:length, head // per_group] @ query[row, head] * scale
            weights = (scores - scores.max()).exp()
            out[row, head] = (weights / weights.sum()) @ v[:length, head // per_group]
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_against_float64(name: str, layout: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    sequences = STEPS[name]
    groups, per_group, k_dim, v_dim, block_tokens = layout
    step = make_step(sequences, layout, dtype)
    starts, counts = [s for s, _ in sequences], [c for _, c in sequences]
    metadata = build_metadata(starts, counts, step.tables, block_tokens, "cpu")
    new_k = torch.cat([k[s:] for k, s in zip(step.keys, starts, strict=True)])
    new_v = torch.cat([v[s:] for v, s in zip(step.values, starts, strict=True)])
    write_kv(new_k, new_v, step.k_pages, step.v_pages, metadata)
    query = torch.randn(sum(counts), groups * per_group, k_dim, generator=torch.Generator().manual_seed(3))
    query = query.to(dtype)
    scale = 0.7 * k_dim**-0.5
    out = paged_attention(query, step.k_pages, step.v_pages, metadata, scale=scale)
    assert out.shape == (sum(counts), groups * per_group, v_dim)
    assert out.dtype == dtype and out.is_contiguous()
    parts = query.split(counts)
    want = torch.cat(
        [
            expected(part, k, v, start, scale)
            for part, k, v, start in zip(parts, step.keys, step.values, starts, strict=True)
        ]
    )
    error = (out.double() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt()
    assert error < TOLERANCE[dtype], f"relative RMS {float(error):.2e}"


def test_writes_go_to_their_slots_and_nowhere_else() -> None:
    layout = LAYOUTS[1]
    sequences = STEPS["mixed"]
    step = make_step(sequences, layout, torch.float32)
    starts, counts = [s for s, _ in sequences], [c for _, c in sequences]
    wanted_k, wanted_v = step.k_pages.clone(), step.v_pages.clone()
    for table, k, v, start in zip(step.tables, step.keys, step.values, starts, strict=True):
        for position in range(start, k.shape[0]):
            wanted_k[table[position // 5], :, position % 5] = k[position]
            wanted_v[table[position // 5], :, position % 5] = v[position]
    metadata = build_metadata(starts, counts, step.tables, 5, "cpu")
    write_kv(
        torch.cat([k[s:] for k, s in zip(step.keys, starts, strict=True)]),
        torch.cat([v[s:] for v, s in zip(step.values, starts, strict=True)]),
        step.k_pages,
        step.v_pages,
        metadata,
    )
    assert torch.equal(step.k_pages.view(torch.int32), wanted_k.view(torch.int32))
    assert torch.equal(step.v_pages.view(torch.int32), wanted_v.view(torch.int32))


def test_empty_step() -> None:
    step = make_step([(3, 1)], LAYOUTS[1], torch.float32)
    metadata = build_metadata([], [], [], 5, "cpu")
    write_kv(torch.empty(0, 2, 12), torch.empty(0, 2, 20), step.k_pages, step.v_pages, metadata)
    out = paged_attention(torch.empty(0, 6, 12), step.k_pages, step.v_pages, metadata, scale=1.0)
    assert out.shape == (0, 6, 20)


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_attention_does_not_write(name: str) -> None:
    sequences = STEPS[name]
    step = make_step([(s + c, 0) for s, c in sequences], LAYOUTS[0], torch.float32)
    before_k, before_v = step.k_pages.clone(), step.v_pages.clone()
    counts = [c for _, c in sequences]
    metadata = build_metadata([s for s, _ in sequences], counts, step.tables, 4, "cpu")
    out = paged_attention(torch.ones(sum(counts), 2, 8), step.k_pages, step.v_pages, metadata, scale=1.0)
    assert torch.isfinite(out).all()
    assert torch.equal(step.k_pages.view(torch.int32), before_k.view(torch.int32))
    assert torch.equal(step.v_pages.view(torch.int32), before_v.view(torch.int32))
