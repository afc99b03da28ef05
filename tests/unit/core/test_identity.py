"""Identity and block keys: every field counts, types never collide, and every process gets the same bytes."""

import hashlib
import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor.core.identity import Identity, _typed_bytes, block_key, block_keys
from phasor.core.ids import BlockKey

BASE = Identity(
    weights_digest="ab" * 32,
    adapter_digest="",
    k_dtype="float32",
    v_dtype="float32",
    layers=(0, 1, 2),
    num_kv_heads=3,
    k_dim=64,
    v_dim=64,
    block_tokens=16,
    retention="full",
    rope_fingerprint="cd" * 32,
    tier=1.0,
    position_basis="absolute",
    numerics_version=1,
    tenant_salt="",
)
FLIPPED: dict[str, Any] = {
    "weights_digest": "ab" * 31 + "ac",
    "adapter_digest": "x",
    "k_dtype": "bfloat16",
    "v_dtype": "bfloat16",
    "layers": (0, 1, 3),
    "num_kv_heads": 4,
    "k_dim": 65,
    "v_dim": 65,
    "block_tokens": 32,
    "retention": "window(4096)",
    "rope_fingerprint": "cd" * 31 + "ce",
    "tier": 1.125,
    "position_basis": "cache",
    "numerics_version": 2,
    "tenant_salt": "tenant",
}
FIELD_NAMES = [field.name for field in fields(Identity)]


@pytest.mark.parametrize("name", FIELD_NAMES)
def test_flipping_one_field_changes_the_namespace_and_is_named(name: str) -> None:
    other = replace(BASE, **{name: FLIPPED[name]})
    assert other.namespace() != BASE.namespace()
    assert BASE.first_difference(other) == (name, getattr(BASE, name), FLIPPED[name])
    tokens = list(range(64))
    assert not set(block_keys(BASE.namespace(), tokens, 16)) & set(block_keys(other.namespace(), tokens, 16))


def test_every_namespace_of_a_flipped_field_is_another() -> None:
    assert set(FLIPPED) == set(FIELD_NAMES)
    assert len({replace(BASE, **{name: FLIPPED[name]}).namespace() for name in FIELD_NAMES}) == len(
        FIELD_NAMES
    )


def test_equal_identities_have_no_difference_and_one_namespace() -> None:
    twin = replace(BASE)
    assert BASE.first_difference(twin) is None
    assert twin.namespace() == BASE.namespace()
    assert len(BASE.namespace()) == 32


def test_the_namespace_of_a_known_identity_stays_what_it_was() -> None:
    # Stored keys outlive a release: whoever changes this number on purpose changes "phasor-namespace-v1" too.
    assert BASE.namespace().hex() == "ec517816641d3a24b8b6443f962f3afda9b895b1e98f8140e003eb1767ddc8bf"


def test_first_difference_names_the_first_of_several() -> None:
    other = replace(BASE, tier=2.0, k_dim=1)
    assert BASE.first_difference(other) == ("k_dim", 64, 1)


def test_text_may_not_move_between_neighbouring_fields() -> None:
    left = replace(BASE, k_dtype="float", v_dtype="32x")
    right = replace(BASE, k_dtype="float32", v_dtype="x")
    assert left.namespace() != right.namespace()


def test_values_of_different_types_never_encode_alike() -> None:
    values = [1, 1.0, "1", (1,), ("1",), (1.0,), "i1", ((1,),), (), "", 0, 0.0, (1, 2), ("1", "2"), (12,)]
    assert len({_typed_bytes(value) for value in values}) == len(values)


def test_a_type_without_an_encoding_is_refused() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        _typed_bytes(None)


def test_a_block_key_is_sha256_of_parent_and_little_endian_ids() -> None:
    parent = BASE.namespace()
    expected = hashlib.sha256(parent + bytes([1, 0, 0, 0, 0, 1, 0, 0])).digest()
    assert block_key(parent, [1, 256]) == expected


def test_a_partial_last_block_has_no_key() -> None:
    namespace = BASE.namespace()
    for num_tokens, num_keys in [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2)]:
        assert len(block_keys(namespace, list(range(num_tokens)), 16)) == num_keys


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=40),
    position=st.integers(0, 39),
    block_tokens=st.sampled_from([1, 3, 4, 8]),
)
def test_a_key_depends_on_all_tokens_up_to_its_end_and_on_no_later_one(
    tokens: list[int], position: int, block_tokens: int
) -> None:
    position %= len(tokens)
    changed = list(tokens)
    changed[position] ^= 1
    namespace = BlockKey(b"n" * 32)
    before, after = block_keys(namespace, tokens, block_tokens), block_keys(namespace, changed, block_tokens)
    touched = position // block_tokens
    assert before[:touched] == after[:touched]
    assert all(old != new for old, new in zip(before[touched:], after[touched:], strict=True))


def test_keys_are_equal_in_processes_with_different_hash_seeds() -> None:
    program = (
        f"from phasor.core.identity import Identity, block_keys\nidentity = {BASE!r}\n"
        "namespace = identity.namespace()\n"
        "print(namespace.hex(), *(key.hex() for key in block_keys(namespace, range(48), 16)))"
    )
    ours = [key.hex() for key in [BASE.namespace(), *block_keys(BASE.namespace(), range(48), 16)]]
    for seed in ("0", "1", "4711"):
        output = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        assert output.split() == ours
