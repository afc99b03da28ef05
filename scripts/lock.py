"""Resolve pyproject.toml in a fresh virtual environment and write requirements/lock.txt from what came out.

The ranges in pyproject.toml stay ranges: they are what Phasor works with; the lock is what CI tests. Standard
library only, since it runs before there is an environment. Needs the package index, and minutes.
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
REQUIREMENTS = REPOSITORY / "requirements"
HEADER = """\
# Exact versions of everything `make venv` installs, apart from triton (requirements/triton.txt).
# Written by `make lock` from the ranges in pyproject.toml; do not edit by hand.
"""
# Tools of the environment, ourselves, and what the machine chooses (see the Makefile on torch and triton).
LEFT_OUT = re.compile(r"^(pip|setuptools|wheel|triton|phasor-serve|nvidia-.*|cuda-.*)(==| @|$)", re.I)


def lock_lines(frozen: str) -> list[str]:
    """Return the lines of the lock file for the output of `pip freeze`."""
    lines = []
    for line in frozen.splitlines():
        if line.startswith(("#", "-e ")) or LEFT_OUT.match(line):
            continue
        # "2.13.0+cpu" names a build of the same release; other machines have another.
        lines.append(re.sub(r"\+[a-z0-9.]+$", "", line))
    return sorted(lines, key=str.lower)


def main() -> int:
    """Resolve and write."""
    torch = next(
        line
        for line in (REQUIREMENTS / "lock.txt").read_text(encoding="utf-8").splitlines()
        if line.startswith("torch==")
    )
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        # torch stays at its version until someone edits that line: an upgrade is a decision, and gigabytes.
        subprocess.run([*pip, "install", torch], check=True)
        subprocess.run([*pip, "install", torch, f"{REPOSITORY}[dev]"], check=True)
        frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    (REQUIREMENTS / "lock.txt").write_text(HEADER + "\n".join(lock_lines(frozen)) + "\n", encoding="utf-8")
    sys.stdout.write("wrote requirements/lock.txt\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
