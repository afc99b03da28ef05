"""The lock file pins every dependency, inside the ranges that pyproject.toml promises."""

import importlib.metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.repository import PYPROJECT, REPOSITORY


def locked() -> dict[str, str]:
    """Return version by canonical name."""
    pins: dict[str, str] = {}
    for file in ("lock.txt", "triton.txt"):
        for line in (REPOSITORY / "requirements" / file).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                name, _, version = line.partition("==")
                assert canonicalize_name(name) not in pins
                pins[canonicalize_name(name)] = version
    return pins


def wanted() -> list[Requirement]:
    """Return the direct requirements, those of the extras included, but not ourselves."""
    project = PYPROJECT["project"]
    texts = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    texts += PYPROJECT["build-system"]["requires"]
    return [requirement for text in texts if (requirement := Requirement(text)).name != project["name"]]


@pytest.mark.parametrize("requirement", wanted(), ids=str)
def test_a_requirement_is_locked_inside_its_range(requirement: Requirement) -> None:
    version = locked()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


def test_every_line_is_one_exact_release() -> None:
    pins = locked()
    assert len(pins) > 60
    assert [f"{name}=={version}" for name, version in pins.items() if not version or "+" in version] == []


def test_what_locked_packages_require_is_locked_too() -> None:
    # `make venv` installs the lock without resolving it, so a hole in it would be found at import only.
    pins = locked()
    missing = set()
    for name in pins:
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed = canonicalize_name(requirement.name)
                if needed not in pins and not needed.startswith(("nvidia-", "cuda-", "setuptools")):
                    missing.add(f"{name} needs {requirement}")
    assert missing == set()


def test_torch_is_what_this_environment_runs() -> None:
    assert importlib.metadata.version("torch").split("+")[0] == locked()["torch"]
