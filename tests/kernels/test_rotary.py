"""Rotation and the write into pages: the native bits are torch's bits, at every instruction set of this machine."""

import pytest
import torch

from phasor.kernels import rotary as rotary_module
from phasor.kernels.native import NativeKernels
from phasor.kernels.paged_attention import build_metadata
from phasor.kernels.rotary import rotate_and_write, rotate_and_write_native, rotate_torch
from tests.helpers.kernels import natives

CASES = [  # tokens, heads, kv heads, key dim, value dim, rotary dim, block tokens
    (0, 2, 1, 8, 8, 8, 4),
    (1, 9, 3, 64, 64, 64, 16),
    (7, 3, 1, 20, 6, 12, 5),
    (33, 8, 8, 128, 96, 32, 1),
    (5, 4, 2, 6, 6, 6, 3),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("native", natives(), ids=lambda native: native.isa.name)
def test_bits_are_torchs(
    native: NativeKernels, case: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, heads, kv_heads, k_dim, v_dim, rotary_dim, block_tokens = case
    torch.manual_seed(1)
    # As in a fused layer: one row holds queries, keys and values.
    row = torch.randn(num_tokens, heads * k_dim + kv_heads * (k_dim + v_dim)).to(dtype)
    query, key, value = row.split((heads * k_dim, kv_heads * k_dim, kv_heads * v_dim), dim=1)
    query = query.unflatten(1, (heads, k_dim))
    key, value = key.unflatten(1, (kv_heads, k_dim)), value.unflatten(1, (kv_heads, v_dim))
    angles = torch.randn(num_tokens, rotary_dim)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    num_blocks = -(-(num_tokens + 3) // block_tokens) + 2
    table = list(range(num_blocks - 1, 0, -1))
    metadata = build_metadata([3], [num_tokens], [table], block_tokens, "cpu")
    pools = [torch.full((2, num_blocks, kv_heads, block_tokens, k_dim + v_dim), float("nan"), dtype=dtype)]
    pools.append(pools[0].clone())
    pages = [(pool[0, ..., :k_dim], pool[1, ..., k_dim:]) for pool in pools]

    monkeypatch.setattr(rotary_module, "native_kernels", lambda: None)
    monkeypatch.setattr("phasor.kernels.paged_attention.native_kernels", lambda: None)
    want = rotate_and_write(query, key, value, cos, sin, *pages[0], metadata)
    torch.testing.assert_close(want, rotate_torch(query, cos, sin), rtol=0, atol=0)
    before_key, before_value = key.clone(), value.clone()
    rotate_and_write_native(native, query, key, value, cos, sin, *pages[1], metadata)
    assert torch.equal(query, want)
    assert torch.equal(key, before_key) and torch.equal(value, before_value)
    bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
    written, wanted = pools[1], pools[0]
    assert torch.equal(written.isnan(), wanted.isnan()), "other slots were written"
    filled = ~wanted.isnan()
    assert torch.equal(written[filled].view(bits), wanted[filled].view(bits))


def test_reference_rotates_by_the_angle() -> None:
    """Against the complex product: dims i and i + R/2 are one complex number (RoFormer's form)."""
    x = torch.randn(4, 2, 10, dtype=torch.float64)
    angles = torch.randn(4, 3, dtype=torch.float64)
    both = torch.cat((angles, angles), dim=-1)
    turned = rotate_torch(x, both.cos(), both.sin())
    number = torch.complex(x[..., :3], x[..., 3:6]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(turned[..., :3], number.real)
    torch.testing.assert_close(turned[..., 3:6], number.imag)
    assert torch.equal(turned[..., 6:], x[..., 6:])
