"""Where things stand in the repository, for the tests that read it."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
ROOTS: list[str] = PYPROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]
NOT_OURS = ("proto/phasor/v1/", "tests/data/")
"""Generated code, and a training script kept as the record of a model: their form is not ours to choose."""


def repository_files(*patterns: str) -> list[str]:
    """Return the paths of tracked files, and of new ones that git does not ignore, that match a pattern."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=30
    ).stdout.splitlines()
    return sorted({path for path in listed if (REPOSITORY / path).exists()})


def our_python_files(*folders: str) -> list[str]:
    """Return the Python files that people here write, in `folders` or everywhere."""
    files = [path for path in repository_files("*.py") if not path.startswith(NOT_OURS)]
    return [path for path in files if not folders or path.split("/")[0] in folders]


def parse(path: str) -> ast.Module:
    """Return the syntax tree of one file of the repository."""
    return ast.parse((REPOSITORY / path).read_text(encoding="utf-8"), filename=path)


def module_name(path: str) -> str:
    """Return the import name of a file under a source root."""
    parts = Path(path).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def portion_files() -> list[str]:
    """Return the Python files under all source roots, generated ones included."""
    return [path for path in repository_files("*.py") if path.split("/")[0] in ROOTS]


def run_python(program: str, **environment: str) -> str:
    """Run `program` in a fresh interpreter and return its output; its stderr is in the failure otherwise."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
