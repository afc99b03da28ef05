"""`phasor demo` on the real model: Paris, a shared prefix, true books, and nothing left behind."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from phasor.deploy.cli import main; main()", "demo"]


def row(printed: str, name: str) -> list[str]:
    (found,) = re.findall(rf"^\s+{name}\s+([\d,. ]+)$", printed, re.MULTILINE)
    return found.replace(",", "").split()


def test_the_demo_answers_shows_where_tokens_came_from_and_leaves_nothing(smollm2_folder):
    before = set(psutil.pids())
    done = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "The capital of France is Paris." in done.stdout

    first, second = row(done.stdout, "1"), row(done.stdout, "2")
    assert (first[1], first[2], first[3]) == (first[0], "0", first[0])  # computed and transferred whole
    assert int(second[2]) >= 16  # the second shares the first's text: at least a block is reused
    assert int(second[1]) + int(second[2]) == int(second[0])
    prefill, decode = row(done.stdout, "prefill-0"), row(done.stdout, "decode-0")
    assert int(prefill[0]) == int(first[1]) + int(second[1])
    assert prefill[2] == decode[2] == str(int(first[3]) + int(second[3]))
    assert prefill[4] == decode[4] == str(int(first[4]) + int(second[4]))

    assert done.stdout.splitlines()[-1] == "All stopped; no process left behind."
    ours = [p for p in psutil.process_iter(["name", "cmdline"]) if p.pid not in before]
    assert [
        p.info for p in ours if "ray::" in p.info["name"] or "/tmp/phasor-" in str(p.info["cmdline"])
    ] == []
