"""Compile `kernels/csrc` into `kernels/phasor/kernels/_native.so`, if that is not what it is built from already.

Used by `hatch_build.py` when Phasor is installed or built into a wheel, and by hand: `python scripts/build_kernels.py`.
Standard library only, no network. The compiler is $CXX, or the first of c++, g++ and clang++ on the PATH. The
result runs on any processor of this architecture: each instruction set is a file of its own, chosen at run time.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = REPOSITORY / "kernels" / "csrc"
LIBRARY = REPOSITORY / "kernels" / "phasor" / "kernels" / "_native.so"

COMPILERS = ("c++", "g++", "clang++")
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    # A product and a sum are one operation only where the code says so: torch's bits are promised in places.
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    # GCC 12 warns of its own intrinsics.
    "-Wno-uninitialized",
)
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
UNITS: dict[str, tuple[str, ...]] = {"dispatch.cpp": (), "ops_plain.cpp": ()}
X86_UNITS: dict[str, tuple[str, ...]] = {
    "ops_avx2.cpp": ("-mavx2", "-mfma"),
    "ops_avx512.cpp": AVX512,
    "ops_avx512_bf16.cpp": (*AVX512, "-mavx512bf16"),
}
AMX_UNITS: dict[str, tuple[str, ...]] = {
    "ops_amx.cpp": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
TIMEOUT_S = 300.0


class BuildError(Exception):
    """There is no compiler, or it did not do it; the message says which and why."""


def source_digest() -> str:
    """Return a digest of everything that the library is made of, the flags included."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, UNITS, X86_UNITS, AMX_UNITS)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def is_current(library: Path = LIBRARY) -> bool:
    """Return whether `library` was built from the sources as they are."""
    return library.is_file() and f"phasor-source-digest:{source_digest()}".encode() in library.read_bytes()


def build(library: Path = LIBRARY) -> bool:
    """Compile and put the library in place at once, so that a running process keeps the one it has open.

    Returns:
        whether anything had to be compiled.

    Raises:
        BuildError: no compiler, or it failed. No library is left then: a stale one may not fit its caller.
    """
    if is_current(library):
        return False
    library.unlink(missing_ok=True)
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        made = Path(folder) / library.name
        _compile_best(compiler, made)
        os.replace(made, library)
    return True


def _compile_best(compiler: str, made: Path) -> None:
    """Compile for as many instruction sets as the compiler knows: an old one still makes the plain kernels."""
    attempts: list[tuple[dict[str, tuple[str, ...]], tuple[str, ...]]] = [(UNITS, ("-DPHASOR_PLAIN_ONLY",))]
    if platform.machine() in ("x86_64", "AMD64"):
        attempts.insert(0, ({**UNITS, **X86_UNITS}, ("-DPHASOR_NO_AMX",)))
        if sys.platform == "linux":
            attempts.insert(0, ({**UNITS, **X86_UNITS, **AMX_UNITS}, ()))
    for units, defines in attempts[:-1]:
        try:
            _compile(compiler, units, defines, made)
        except BuildError as exc:
            print(f"{exc}\ntrying with fewer instruction sets", file=sys.stderr)
        else:
            return
    _compile(compiler, *attempts[-1], made)


def find_compiler() -> str:
    """Return the compiler's path.

    Raises:
        BuildError: there is none.
    """
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(
        f"no C++ compiler found ({', '.join(names)}): Phasor's CPU kernels are left out, and torch's are used, "
        "several times slower. Install one (Debian: apt-get install g++) and install Phasor again"
    )


def _compile(compiler: str, units: dict[str, tuple[str, ...]], extra: tuple[str, ...], made: Path) -> None:
    define = f'-DPHASOR_SOURCE_DIGEST="{source_digest()}"'
    running = []
    objects = [made.with_name(f"{Path(name).stem}.o") for name in units]
    for (name, flags), target in zip(units.items(), objects, strict=True):
        command = [
            compiler,
            *COMMON_FLAGS,
            *flags,
            *extra,
            define,
            "-c",
            str(SOURCES / name),
            "-o",
            str(target),
        ]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in running]
    for name, process, output in zip(units, running, outputs, strict=True):
        if process.returncode:
            raise BuildError(f"{compiler} failed on {name}:\n{output[-2000:]}")
    command = [compiler, "-shared", *map(str, objects), "-o", str(made), "-lm"]
    linked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if linked.returncode:
        raise BuildError(f"{compiler} failed to link:\n{linked.stderr[-2000:]}")


def main() -> None:
    """Build, and say what was done."""
    try:
        built = build()
    except BuildError as exc:
        sys.exit(str(exc))
    print(f"{LIBRARY.relative_to(REPOSITORY)}: {'built' if built else 'up to date'}")


if __name__ == "__main__":
    main()
