"""The C++ kernels of `kernels/csrc` through ctypes: found, checked, and one instruction set chosen, once.

Nothing here knows torch: arguments are addresses, strides and counts. Calls release the GIL. Where there is no
library, or it says nothing about this processor, every kernel has a torch implementation beside it.
"""

import ctypes
import enum
import functools
import logging
import os
from pathlib import Path
from typing import ClassVar

LIBRARY = Path(__file__).with_name("_native.so")
"""Built by `hatch_build.py` at install; absent where there was no C++ compiler."""

CHOICE_VARIABLE = "PHASOR_KERNELS"
"""Environment variable: "torch" for no native kernels, or the name of an `Isa` for at most that one."""

ABI_VERSION = 1
"""`PHASOR_ABI_VERSION` of csrc/phasor_kernels.h that the structures below are written for."""

_I64, _PTR, _I32, _F32 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32, ctypes.c_float

_log = logging.getLogger(__name__)


class Isa(enum.IntEnum):
    """Instruction sets that the kernels are compiled for, each a superset of those before it."""

    PLAIN = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


class ElementType(enum.IntEnum):
    """`PhasorType` of csrc/phasor_kernels.h."""

    F32 = 0
    BF16 = 1


def _fields(pointers: str, counts: str, *rest: tuple[str, type]) -> list[tuple[str, type]]:
    return [*((name, _PTR) for name in pointers.split()), *((name, _I64) for name in counts.split()), *rest]


class AttentionArgs(ctypes.Structure):
    """`PhasorAttention` of csrc/phasor_kernels.h, field by field."""

    _fields_: ClassVar = _fields(
        "query k_pages v_pages out rows tables lengths",
        "num_sequences table_stride query_stride out_stride "
        "k_block_stride k_head_stride k_token_stride v_block_stride v_head_stride v_token_stride "
        "num_heads num_kv_heads k_dim v_dim block_tokens",
        ("scale", _F32),
        ("type", _I32),
    )


class LinearArgs(ctypes.Structure):
    """`PhasorLinear` of csrc/phasor_kernels.h, field by field."""

    _fields_: ClassVar = _fields(
        "x weight bias norm residual out",
        "num_rows num_inputs num_outputs x_stride",
        ("norm_eps", _F32),
        ("gated", _I32),
        ("type", _I32),
        ("out_type", _I32),
    )


class RotaryArgs(ctypes.Structure):
    """`PhasorRotary` of csrc/phasor_kernels.h, field by field."""

    _fields_: ClassVar = _fields(
        "query key value cos sin k_pages v_pages slot_blocks slot_offsets",
        "num_tokens query_stride key_stride value_stride "
        "k_block_stride k_head_stride k_token_stride v_block_stride v_head_stride v_token_stride "
        "num_heads num_kv_heads k_dim v_dim rotary_dim",
        ("type", _I32),
    )


class NativeKernels:
    """The loaded library at one instruction set. Any thread may call it.

    Args:
        library: the shared object.
        isa: what to compute with; must not exceed `best_isa`.
    """

    def __init__(self, library: ctypes.CDLL, isa: Isa) -> None:
        self.isa = isa
        self.library = library
        for name, result in (("attention", None), ("rotary", None), ("linear", _I32)):
            function = getattr(library, f"phasor_{name}")
            function.argtypes, function.restype = (_PTR, _I32), result
        self._attention, self._rotary = library.phasor_attention, library.phasor_rotary
        self._linear = library.phasor_linear

    def at(self, isa: Isa) -> "NativeKernels":
        """Return the same library at another instruction set that this processor has."""
        assert isa <= best_isa(self.library), f"this processor has no {isa.name}"
        return NativeKernels(self.library, isa)

    def attention(self, args: AttentionArgs) -> None:
        """Run `phasor_attention`."""
        self._attention(ctypes.addressof(args), self.isa)

    def rotary(self, args: RotaryArgs) -> None:
        """Run `phasor_rotary`."""
        self._rotary(ctypes.addressof(args), self.isa)

    def linear(self, args: LinearArgs) -> None:
        """Run `phasor_linear`.

        Raises:
            MemoryError: no memory for its scratch.
        """
        if self._linear(ctypes.addressof(args), self.isa):
            raise MemoryError("a linear kernel found no memory for its rows")


def best_isa(library: ctypes.CDLL) -> Isa:
    """Return the best instruction set of `library` that this processor has."""
    return Isa(library.phasor_best_isa())


def source_digest(library: ctypes.CDLL) -> str:
    """Return the digest of the sources that `library` was built from."""
    function = library.phasor_source_digest
    function.restype = ctypes.c_char_p
    return str(function().decode()).partition(":")[2]


@functools.cache
def native_kernels() -> NativeKernels | None:
    """Return the kernels that this process uses, or None for torch's; decided and logged at the first call.

    Raises:
        ValueError: `PHASOR_KERNELS` names neither "torch" nor an instruction set that this processor has.
    """
    return load(LIBRARY, os.environ.get(CHOICE_VARIABLE, ""))


def load(path: Path, choice: str) -> NativeKernels | None:
    """Load the library at `path`, or return None where there is none or `choice` is "torch".

    Raises:
        ValueError: `choice` is not "", "torch" or the name of an instruction set that this processor has.
    """
    known = {isa.name.lower(): isa for isa in Isa}
    if choice not in ("", "torch", *known):
        raise ValueError(f"{CHOICE_VARIABLE}={choice} is unknown; choose one of torch, {', '.join(known)}")
    if choice == "torch":
        _log.info("kernels: torch, because %s=torch", CHOICE_VARIABLE)
        return None
    try:
        library = ctypes.CDLL(str(path))
        abi_version = library.phasor_abi_version()
        if abi_version != ABI_VERSION:
            raise OSError(f"{path} has version {abi_version}, not {ABI_VERSION}; install Phasor again")
    except (OSError, AttributeError) as exc:
        _log.warning(
            "kernels: torch, because the native ones cannot be loaded (several times slower): %s", exc
        )
        return None
    best = best_isa(library)
    isa = known.get(choice, best)
    if isa > best:
        raise ValueError(f"{CHOICE_VARIABLE}={choice}: this processor has {best.name.lower()} at most")
    _log.info("kernels: native, %s", isa.name.lower())
    return NativeKernels(library, isa)
