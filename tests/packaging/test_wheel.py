"""The wheel holds every portion, the command and the licence, and nothing else."""

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.repository import REPOSITORY, ROOTS, portion_files, repository_files, run_python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # Without isolation: hatchling is in the environment, and no index is asked.
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(out),
        str(REPOSITORY),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("phasor_serve-*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_module_of_every_portion_is_in_the_wheel(names: set[str]) -> None:
    expected = {path.partition("/")[2] for path in portion_files()}
    assert expected
    assert expected - names == set()


def test_every_portion_says_that_it_is_typed(names: set[str]) -> None:
    expected = {path.partition("/")[2] for root in ROOTS for path in repository_files(f"{root}/*py.typed")}
    assert len(expected) >= len(ROOTS)
    assert expected - names == set()


def test_nothing_else_is_in_the_wheel(names: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in names} == {"phasor", "phasor_serve"}
    assert "phasor/__init__.py" not in names
    assert [
        name for name in names if "test" in Path(name).name or name.endswith((".safetensors", ".pyc"))
    ] == []


def test_the_command_and_the_licence_are_in_the_wheel(wheel: Path, names: set[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        (licence,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(entry_points).decode())
        assert parser["console_scripts"]["phasor"] == "phasor.deploy.cli:main"
        assert b"Apache License" in archive.read(licence)


def test_the_unpacked_wheel_imports_as_a_namespace(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import phasor, phasor.core.identity as identity, phasor.wire.status as status\n"
        "print(getattr(phasor, '__file__', None), identity.__file__, status.__file__, sep='\\n')"
    )
    origin, identity, status = run_python(program, PYTHONPATH=str(tmp_path)).splitlines()
    assert origin == "None"
    assert Path(identity) == tmp_path / "phasor/core/identity.py"
    assert Path(status) == tmp_path / "phasor/wire/status.py"
