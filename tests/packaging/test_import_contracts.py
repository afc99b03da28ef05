"""The import contracts can fail: a copy of the sources with one forbidden import each breaks them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.repository import PYPROJECT, REPOSITORY, ROOTS

CONTRACTS: list[str] = [contract["name"] for contract in PYPROJECT["tool"]["importlinter"]["contracts"]]
VIOLATIONS = {
    "core/phasor/core/clock.py": "import phasor.v1.inference_pb2",
    "kernels/phasor/kernels/__init__.py": "import phasor.core.errors",
    "engine/phasor/engine/blocks.py": "import torch",
    "engine/phasor/transport/__init__.py": "import phasor.engine.pages\nimport ray",
    "prefill_worker/phasor/prefill_worker/scheduler.py": "import phasor.decode_worker",
    "router/phasor/router/policy.py": "import phasor.engine.pages",
}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for root in ROOTS:
        shutil.copytree(REPOSITORY / root, tmp_path / root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    return tmp_path


def broken_contracts(repository: Path) -> set[str]:
    """Run import-linter on `repository` and return the names of the contracts it calls broken."""
    path = os.pathsep.join(str(repository / root) for root in ROOTS)
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "Contracts:" in done.stdout, done.stdout + done.stderr
    return set(re.findall(r"^(.*) BROKEN$", done.stdout, re.MULTILINE))


def test_the_sources_as_they_are_keep_every_contract(copied: Path) -> None:
    assert broken_contracts(copied) == set()


def test_a_forbidden_import_breaks_its_contract(copied: Path) -> None:
    for file, statement in VIOLATIONS.items():
        with (copied / file).open("a", encoding="utf-8") as stream:
            stream.write(f"\n{statement}\n")
    assert broken_contracts(copied) == set(CONTRACTS)
