"""The native kernels at every instruction set that this machine can run."""

from phasor.kernels.native import LIBRARY, Isa, NativeKernels, best_isa, load


def natives() -> list[NativeKernels]:
    """Return one per instruction set; none where there was no compiler (a packaging test tells that apart)."""
    native = load(LIBRARY, "")
    if native is None:
        return []
    return [native.at(isa) for isa in Isa if isa <= best_isa(native.library)]
