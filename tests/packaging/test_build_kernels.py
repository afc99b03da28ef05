"""The kernels' build: current here, complete without a compiler, and less with an old one."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from phasor.kernels.native import ABI_VERSION, LIBRARY, Isa, best_isa, load, source_digest
from tests.packaging.repository import REPOSITORY, repository_files

OLD_COMPILER = """#!{shell}
for argument in "$@"; do
  case "$argument" in -mavx512*|-mamx*) echo "unrecognized option $argument" >&2; exit 1;; esac
done
exec {compiler} "$@" -O0
"""


@pytest.fixture(scope="module")
def build_kernels() -> ModuleType:
    path = REPOSITORY / "scripts" / "build_kernels.py"
    spec = importlib.util.spec_from_file_location("build_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"
)


@needs_compiler
def test_this_environment_runs_what_the_sources_say(build_kernels: ModuleType) -> None:
    assert build_kernels.is_current(), "run `make venv` or python scripts/build_kernels.py"
    native = load(LIBRARY, "")
    assert native is not None
    assert source_digest(native.library) == build_kernels.source_digest()


def test_a_changed_source_is_noticed(
    build_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(build_kernels.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build_kernels, "SOURCES", copy)
    before = build_kernels.source_digest()
    (copy / "dispatch.cpp").write_text((copy / "dispatch.cpp").read_text() + "\n")
    assert build_kernels.source_digest() != before
    assert not build_kernels.is_current()


def test_without_a_compiler_a_stale_library_goes(
    build_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    stale = tmp_path / "_native.so"
    stale.write_bytes(b"of other sources")
    with pytest.raises(build_kernels.BuildError, match=r"no C\+\+ compiler found .* install Phasor again"):
        build_kernels.build(stale)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_compiler_is_quoted(
    build_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!{shutil.which('sh')}\necho internal trouble\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build_kernels.BuildError, match="internal trouble"):
        build_kernels.build(tmp_path / "_native.so")
    assert [path.name for path in tmp_path.iterdir()] == ["c++"]


@needs_compiler
def test_an_old_compiler_makes_fewer_instruction_sets(
    build_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "old-c++"
    compiler.write_text(OLD_COMPILER.format(shell=shutil.which("sh"), compiler=build_kernels.find_compiler()))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    library = tmp_path / "_native.so"
    assert build_kernels.build(library)
    assert not build_kernels.build(library), "built twice"
    loaded = ctypes.CDLL(str(library))
    assert loaded.phasor_abi_version() == ABI_VERSION
    assert best_isa(loaded) is Isa.PLAIN


def test_a_wheel_without_a_compiler_is_whole_and_pure(tmp_path: Path) -> None:
    copy = tmp_path / "phasor"
    for path in repository_files(
        "*.py", "*.typed", "pyproject.toml", "README.md", "LICENSE", "kernels/csrc/*"
    ):
        if not path.startswith(("tests/", "bench/")):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / path, copy / path)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "out"),
        str(copy),
    ]
    environment = {**os.environ, "PATH": str(tmp_path)}
    environment.pop("CXX", None)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no C++ compiler found" in done.stdout + done.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "phasor/kernels/native.py" in names
    assert not [name for name in names if name.endswith(".so")]


@needs_compiler
def test_a_wheel_with_kernels_says_for_which_platform(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(REPOSITORY),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name or "-py3-none-macosx_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert "phasor/kernels/_native.so" in archive.namelist()
        assert archive.read("phasor/kernels/_native.so") == LIBRARY.read_bytes()
