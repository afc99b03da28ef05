"""What must be equal before KV may be reused, as one hash; and the chain of block keys under it.

Source: DESIGN section 5. Keys are seedless: equal in every process and on every host.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

from phasor.core.ids import BlockKey

NUMERICS_VERSION = 1
"""Raise when model code changes so that the same tokens give other KV bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything that must match for KV to be reusable.

    Two workers exchange it when a link opens (`first_difference`); a pool and the shared store start their
    block keys from `namespace()`.
    """

    weights_digest: str
    """SHA-256 (hex) over the contents of the weight files."""
    adapter_digest: str
    """SHA-256 (hex) of the adapter's weights; empty without one."""
    k_dtype: str
    """dtype and codec of K, e.g. "float32" or "int8/g64"."""
    v_dtype: str
    """dtype and codec of V."""
    layers: tuple[int, ...]
    """Layer indices of the layer group."""
    num_kv_heads: int
    """KV heads of the whole model, not of one rank."""
    k_dim: int
    """Elements of one key."""
    v_dim: int
    """Elements of one value."""
    block_tokens: int
    """Tokens per block."""
    retention: str
    """Retention policy of the group, e.g. "full" or "window(4096)"."""
    rope_fingerprint: str
    """Hash of the effective rope per layer (RopeSchedule.fingerprint)."""
    tier: float
    """The rope scaling factor under which keys are written."""
    position_basis: str
    """How positions are counted: "absolute" or "cache"."""
    numerics_version: int
    """Version of the model code's arithmetic."""
    tenant_salt: str
    """Derived by the server from the authenticated caller; empty without tenants."""

    def namespace(self) -> BlockKey:
        """Return the key that every chain of block keys under this identity starts from."""
        digest = hashlib.sha256(b"phasor-namespace-v1")
        for field in fields(self):
            _feed(digest, field.name.encode())
            _feed(digest, _typed_bytes(getattr(self, field.name)))
        return BlockKey(digest.digest())

    def first_difference(self, other: "Identity") -> tuple[str, object, object] | None:
        """Return (field, ours, theirs) of the first field that differs, or None."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return field.name, ours, theirs
        return None


def _feed(digest: "hashlib._Hash", data: bytes) -> None:
    digest.update(struct.pack("<Q", len(data)))
    digest.update(data)


def _typed_bytes(value: object) -> bytes:
    """Encode so that values of different types never collide (1, 1.0 and "1" are three values)."""
    if isinstance(value, str):
        return b"s" + value.encode()
    if isinstance(value, int):
        return b"i" + str(value).encode()
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, tuple):
        parts = [_typed_bytes(item) for item in value]
        return b"t" + b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    raise TypeError(f"identity fields are str, int, float or tuples of them, got {type(value).__name__}")


def block_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Return the key of a block whose past is `parent` and whose own tokens are `token_ids`."""
    return BlockKey(hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest())


def block_keys(namespace: BlockKey, token_ids: Sequence[int], block_tokens: int) -> list[BlockKey]:
    """Return the keys of all whole blocks of `token_ids`; a partial last block has none."""
    keys: list[BlockKey] = []
    parent = namespace
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        parent = block_key(parent, token_ids[start : start + block_tokens])
        keys.append(parent)
    return keys
