"""Linears of few rows: every instruction set of this machine, and torch's path, against float64."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from phasor.kernels import linear as linear_module
from phasor.kernels.linear import linear, linear_native, linear_torch
from phasor.kernels.native import Isa, NativeKernels
from tests.helpers.kernels import natives

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
EPS = 1e-5
ROWS = (0, 1, 2, 3, 4, 5, 8, 13, 17, 32)
SHAPES = [(1, 1), (7, 31), (131, 64), (128, 577), (200, 96), (520, 32)]  # outputs, inputs


def make(rows: int, inputs: int, dtype: torch.dtype, *, seed: int = 3) -> torch.Tensor:
    """Return `[rows, inputs]` with NaN right behind every row and the last element."""
    holder = torch.full((rows + 1, inputs + 5), NAN, dtype=dtype)
    values = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) + 0.1
    holder[:rows, :inputs] = values.to(dtype)
    return holder[:rows, :inputs]


def make_weight(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous `[outputs, inputs]` with NaN before and behind it."""
    holder = torch.full((outputs * inputs + 128,), NAN, dtype=dtype)
    values = torch.randn(outputs * inputs, generator=torch.Generator().manual_seed(5)) * inputs**-0.5
    holder[64:-64] = values.to(dtype)
    return holder[64:-64].view(outputs, inputs)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    if not want.numel():
        return 0.0
    return float((got.double() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("native", natives(), ids=lambda native: native.isa.name)
def test_product_against_float64(native: NativeKernels, dtype: torch.dtype) -> None:
    for (outputs, inputs), rows in product(SHAPES, ROWS):
        x, weight = make(rows, inputs, dtype), make_weight(outputs, inputs, dtype)
        out = linear_native(native, x, weight, None, None, 0.0, None, False, None)
        assert out.dtype == dtype and out.is_contiguous()
        assert error(out, x.double() @ weight.double().T) < TOLERANCE[dtype], (rows, outputs, inputs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "native", [None, *natives()], ids=lambda native: native.isa.name if native else "torch"
)
def test_everything_around_the_product(native: NativeKernels | None, dtype: torch.dtype) -> None:
    for (outputs, inputs), rows in product([(131, 577), (256, 64)], (1, 3, 8, 20)):
        x, weight = make(rows, inputs, dtype), make_weight(outputs, inputs, dtype)
        norm, bias = make(1, inputs, dtype, seed=7)[0], make(1, outputs, dtype, seed=8)[0]
        residual = make(rows, outputs, dtype, seed=9).contiguous()
        wide = x.double()
        normed = wide * (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
        plain = normed @ weight.double().T + bias.double() + residual.double()
        half = make_weight(2 * outputs, inputs, dtype)
        gate, up = (normed @ half.double().T).chunk(2, dim=-1)
        for arguments, want in (
            ((weight, bias, norm, EPS, residual, False, torch.float32), plain),
            ((half, None, norm, EPS, None, True, None), F.silu(gate) * up),
        ):
            out = linear_native(native, x, *arguments) if native else linear_torch(x, *arguments)
            assert out.dtype == (arguments[-1] or dtype)
            # In bfloat16 the normalised row, and torch's gate and up, are rounded on the way.
            assert error(out, want) < 2 * TOLERANCE[dtype], (rows, outputs, inputs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("native", natives(), ids=lambda native: native.isa.name)
def test_a_row_does_not_depend_on_the_others(native: NativeKernels, dtype: torch.dtype) -> None:
    x, weight = make(32, 96, dtype), make_weight(200, 96, dtype)
    x[3] = NAN
    whole = linear_native(native, x, weight, None, None, 0.0, None, False, None)
    assert whole[3].isnan().all() and whole[[0, 1, 2, 4, 31]].isfinite().all()
    for count in (1, 2, 3, 4, 5, 8, 11, 17):
        part = linear_native(native, x[32 - count :], weight, None, None, 0.0, None, False, None)
        if native.isa is Isa.AMX and dtype is torch.bfloat16 and count < 5:
            assert error(part, whole[32 - count :].double()) < TOLERANCE[dtype]
        else:
            assert torch.equal(part, whole[32 - count :]), count


@pytest.mark.parametrize("native", natives(), ids=lambda native: native.isa.name)
def test_large_and_infinite_gates(native: NativeKernels) -> None:
    """silu at its ends: a large negative gate closes, a large positive one is itself, NaN stays NaN."""
    gates = torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4, NAN])
    weight = torch.cat((torch.ones(1, 1), torch.full((1, 1), 2.0)))
    x = gates[:, None]
    out = linear_native(native, x, weight, None, None, 0.0, None, True, None)
    # up is twice the gate
    want = F.silu(gates.double()) * 2 * gates.double()
    torch.testing.assert_close(out[:, 0].double(), want, rtol=1e-5, atol=1e-28, equal_nan=True)


def test_dispatch_takes_torch_for_what_the_kernel_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_native(*_: object) -> torch.Tensor:
        raise AssertionError("the native kernel was called")

    monkeypatch.setattr(linear_module, "linear_native", no_native)
    weight = make_weight(16, 8, torch.float32)
    for x, w in (
        (make(200, 8, torch.float32), weight),
        (make(2, 8, torch.float16), weight.half()),
        (make(2, 8, torch.float64), weight.double()),
        (make(8, 2, torch.float32).t(), weight),
        (make(2, 16, torch.float32), weight.t()),
    ):
        torch.testing.assert_close(linear(x, w), F.linear(x, w))
    monkeypatch.setattr(linear_module, "native_kernels", lambda: None)
    x = make(2, 8, torch.float32)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
