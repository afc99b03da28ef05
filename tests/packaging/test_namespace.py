"""`phasor` is a namespace package of portions: no `__init__.py` may ever hide the other portions."""

import importlib.util

import pytest

import phasor
from tests.packaging.repository import PYPROJECT, REPOSITORY, ROOTS

PORTIONS = sorted(
    path for root in ROOTS for path in (REPOSITORY / root / "phasor").iterdir() if path.name != "__pycache__"
)


def test_the_namespace_has_no_file() -> None:
    assert getattr(phasor, "__file__", None) is None
    spec = importlib.util.find_spec("phasor")
    assert spec is not None
    assert spec.origin is None


def test_no_root_has_an_init_file() -> None:
    assert [str(path) for path in REPOSITORY.glob("*/phasor/__init__.py")] == []
    assert [root for root in ROOTS if (REPOSITORY / root / "__init__.py").exists()] == []


def test_every_folder_with_a_portion_is_a_source_root() -> None:
    assert sorted(path.parent.name for path in REPOSITORY.glob("*/phasor")) == sorted(ROOTS)


@pytest.mark.parametrize("portion", PORTIONS, ids=lambda path: path.name)
def test_a_portion_is_a_typed_package(portion: object) -> None:
    assert portion.is_dir(), f"{portion}: modules belong into a portion, not beside it"  # type: ignore[attr-defined]
    assert (portion / "py.typed").is_file()  # type: ignore[operator]


@pytest.mark.parametrize("root", ROOTS)
def test_a_root_is_importable(root: str) -> None:
    assert str(REPOSITORY / root / "phasor") in list(phasor.__path__)


def test_the_lists_of_roots_and_portions_agree() -> None:
    tool = PYPROJECT["tool"]
    assert tool["hatch"]["build"]["targets"]["wheel"]["packages"] == [f"{root}/phasor" for root in ROOTS]
    assert tool["mypy"]["mypy_path"].split(":") == ROOTS
    assert sorted(tool["importlinter"]["root_packages"]) == sorted(f"phasor.{path.name}" for path in PORTIONS)
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert f"ROOTS := {' '.join(ROOTS)}\n" in makefile
