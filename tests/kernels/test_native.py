"""Which kernels a process uses, and paged attention at every instruction set of this machine."""

import logging
from pathlib import Path

import pytest
import torch

from phasor.kernels import native as native_module
from phasor.kernels.native import CHOICE_VARIABLE, LIBRARY, Isa, NativeKernels, load, native_kernels
from phasor.kernels.paged_attention import attend_native, build_metadata
from tests.helpers.kernels import natives
from tests.kernels.test_paged_attention import NAN, STEPS, TOLERANCE, expected, make_step

DECODES = {
    **{name: STEPS[name] for name in ("one-token", "decode")},
    "long": [(100, 1), (31, 1), (32, 1), (63, 1)],
}
LAYOUTS = [  # groups, heads per group, k_dim, v_dim, block_tokens
    (2, 1, 8, 8, 4),
    (3, 3, 64, 64, 16),
    (2, 3, 12, 20, 5),
    (1, 8, 33, 128, 16),
    (3, 5, 7, 7, 1),
    (1, 2, 80, 40, 64),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("native", natives(), ids=lambda native: native.isa.name)
def test_attention_against_float64(
    native: NativeKernels, layout: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    groups, per_group, k_dim, v_dim, block_tokens = layout
    scale = 0.7 * k_dim**-0.5
    for name, sequences in DECODES.items():
        # Everything is written before; behind each sequence's end, and in the null block, there is NaN.
        step = make_step([(start + 1, 0) for start, _ in sequences], layout, dtype)
        step.k_pages[0], step.v_pages[0] = NAN, NAN
        starts = [start for start, _ in sequences]
        metadata = build_metadata(starts, [1] * len(starts), step.tables, block_tokens, "cpu")
        # Rows are those of a wider tensor, as where queries are a part of a joint projection.
        wide = torch.full((len(starts), groups * per_group + 2, k_dim), NAN, dtype=dtype)
        query = wide[:, :-2]
        query.copy_(torch.randn(query.shape, generator=torch.Generator().manual_seed(3)))
        out = torch.full((len(starts), groups * per_group, v_dim), NAN, dtype=dtype)
        assert metadata.single_queries is not None
        attend_native(native, query, step.k_pages, step.v_pages, metadata.single_queries, out, scale)
        for row, start in enumerate(starts):
            want = expected(query[row : row + 1], step.keys[row], step.values[row], start, scale)
            error = (out[row].double() - want[0]).pow(2).mean().sqrt() / want.pow(2).mean().sqrt()
            assert error < TOLERANCE[dtype], f"{name}, sequence {row}: relative RMS {float(error):.2e}"
        # Alone, each sequence has the same bits.
        for row, start in enumerate(starts):
            alone = build_metadata([start], [1], [step.tables[row]], block_tokens, "cpu")
            again = torch.full_like(out[:1], NAN)
            assert alone.single_queries is not None
            attend_native(
                native, query[row : row + 1], step.k_pages, step.v_pages, alone.single_queries, again, scale
            )
            assert torch.equal(again[0], out[row])


@pytest.mark.parametrize("native", natives(), ids=lambda native: native.isa.name)
def test_attention_with_large_scores(native: NativeKernels) -> None:
    """Scores of thousands, rising and falling: the online softmax neither overflows nor forgets."""
    layout = (1, 1, 4, 4, 4)
    for order in (1.0, -1.0):
        step = make_step([(90, 0)], layout, torch.float32)
        step.keys[0][:, 0] = order * torch.linspace(-900, 900, 90)[:, None]
        for position in range(90):
            step.k_pages[step.tables[0][position // 4], :, position % 4] = step.keys[0][position]
        query = torch.full((1, 1, 4), 3.0)
        metadata = build_metadata([89], [1], step.tables, 4, "cpu")
        out = torch.empty(1, 1, 4)
        assert metadata.single_queries is not None
        attend_native(native, query, step.k_pages, step.v_pages, metadata.single_queries, out, 1.0)
        want = expected(query, step.keys[0], step.values[0], 89, 1.0)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)


def test_choice_by_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="phasor.kernels")
    assert load(LIBRARY, "torch") is None
    assert "torch" in caplog.text
    for native in natives():
        chosen = load(LIBRARY, native.isa.name.lower())
        assert chosen is not None and chosen.isa is native.isa
        assert f"native, {native.isa.name.lower()}" in caplog.text
    with pytest.raises(ValueError, match="PHASOR_KERNELS=fast is unknown; choose one of torch, plain"):
        load(LIBRARY, "fast")


def test_no_library_is_said_and_not_fatal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path / "nowhere.so", "") is None
    (tmp_path / "broken.so").write_bytes(b"not a library")
    assert load(tmp_path / "broken.so", "") is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "several times slower" in caplog.text


@pytest.mark.skipif(not natives(), reason="no native kernels here")
def test_a_library_of_another_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_module, "ABI_VERSION", -1)
    assert load(LIBRARY, "") is None
    assert "install Phasor again" in caplog.text


@pytest.mark.skipif(not natives(), reason="no native kernels here")
def test_more_than_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_module, "best_isa", lambda _: Isa.AVX2)
    with pytest.raises(ValueError, match="this processor has avx2 at most"):
        load(LIBRARY, "avx512")


def test_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE_VARIABLE, "torch")
    assert native_kernels.__wrapped__() is None
    monkeypatch.setenv(CHOICE_VARIABLE, "quick")
    with pytest.raises(ValueError, match="quick"):
        native_kernels.__wrapped__()
