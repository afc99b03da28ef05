"""Linears of few rows with what stands before and after them in a decoder: one dispatch, native or torch.

Decoding reads every weight once per step, so a step costs what reading them costs; torch's own linears of a few
rows read at a third of a CPU's bandwidth or less. Letters: T rows, K inputs, N outputs.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from phasor.kernels.native import ElementType, Isa, LinearArgs, NativeKernels, native_kernels

ELEMENT_TYPES = {torch.float32: ElementType.F32, torch.bfloat16: ElementType.BF16}

MAX_NATIVE_ROWS = 32
"""With more rows, reading weights is not what a linear costs, and torch's blocked code wins."""

MAX_NATIVE_ROWS_BF16 = 8
"""The same for bfloat16 without a matrix unit: dot products of bfloat16 are no faster than those of float32."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `post(pre(x) @ weight.T)`.

    On the native path a row's result is the same bits however many other rows there are (in bfloat16 on a matrix
    unit: up to the order of float32 summation, which changes once, between 4 rows and 5).

    Args:
        x: `[T, K]`, unit stride within a row.
        weight: `[N, K]`, contiguous; `[2 N, K]` with `gated`.
        bias: `[N]`, not with `gated`.
        norm: `[K]`: RMS-normalise each row first and multiply by this.
        norm_eps: added to the mean square.
        residual: `[T, N]`, contiguous: added at the end; not with `gated`.
        gated: `silu(y[:, :N]) * y[:, N:]` of the product `y` instead of `y`.
        out_dtype: x's by default.

    Returns:
        `[T, N]`, contiguous, newly allocated.
    """
    native = native_kernels()
    if native is None or not suits_native(native, x, weight):
        return linear_torch(x, weight, bias, norm, norm_eps, residual, gated, out_dtype)
    return linear_native(native, x, weight, bias, norm, norm_eps, residual, gated, out_dtype)


def suits_native(native: NativeKernels, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the native kernel computes this, and is the faster one."""
    slow = x.dtype == torch.bfloat16 and native.isa < Isa.AMX
    return (
        x.shape[0] <= (MAX_NATIVE_ROWS_BF16 if slow else MAX_NATIVE_ROWS)
        and x.dtype in ELEMENT_TYPES
        and weight.dtype == x.dtype
        and x.device.type == "cpu"
        and torch.get_num_threads() == 1
        and weight.is_contiguous()
        and x.stride(1) == 1
    )


def linear_native(
    native: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    norm_eps: float,
    residual: torch.Tensor | None,
    gated: bool,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Compute `linear` natively, whatever `suits_native` says about speed."""
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(x.shape[0], num_outputs, dtype=out_dtype or x.dtype)
    args = LinearArgs(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if norm is None else norm.data_ptr(),
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        weight.shape[1],
        num_outputs,
        x.stride(0),
        norm_eps,
        gated,
        ELEMENT_TYPES[x.dtype],
        ELEMENT_TYPES[out.dtype],
    )
    native.linear(args)
    return out


def linear_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    norm_eps: float,
    residual: torch.Tensor | None,
    gated: bool,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Compute `linear` with torch: the reference, and the path for many rows, GPUs and other dtypes."""
    if norm is not None:
        x = rms_norm(x, norm, norm_eps)
    y = F.linear(x, weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        y = y + residual
    return y.to(out_dtype) if out_dtype else y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x over its rows' root mean square, rounded, times `weight`: transformers' order of operations."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)
