"""A deployment that stays in a cluster: left behind, looked at, replaced, ended. Workers are stubs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(200)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def story() -> dict[str, dict[str, Any]]:
    """Run the driver's whole story once; its steps by name."""
    command = [sys.executable, "-m", "tests.integration.detach_driver"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=190, check=False)
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-4000:]
    return {step["step"]: step for step in steps}


def address(printed: str) -> str:
    (found,) = re.findall(r"^Serving \S+ \(float32\) at (127\.0\.0\.1:\d+)$", printed, re.MULTILINE)
    return found


def rows(step: dict[str, Any]) -> list[tuple[str, str]]:
    """The workers and their states in a status table."""
    return re.findall(r"((?:decode|prefill)-\d+)\s+\S\s+(\w+)", step["out"])


def test_detached_it_serves_after_the_command_returned(story):
    assert "phasor chat --address " + address(story["first"]["printed"]) in story["first"]["printed"]
    assert story["status"]["code"] == 0
    assert f"router at {address(story['first']['printed'])}" in story["status"]["out"]
    assert rows(story["status"]) == [("decode-0", "ready"), ("prefill-0", "ready")]


def test_the_same_command_again_changes_nothing(story):
    assert address(story["same_again"]["printed"]) == address(story["first"]["printed"])


def test_another_configuration_is_refused_unless_told_to_replace(story):
    assert "serves with another configuration; add --replace" in story["another"]["printed"]
    assert rows(story["status_replaced"]) == [
        ("decode-0", "ready"),
        ("decode-1", "ready"),
        ("prefill-0", "ready"),
    ]


def test_stop_ends_all_of_it_and_what_is_not_there_is_said(story):
    assert (story["stop"]["code"], story["stop"]["out"]) == (0, "Stopped.\n")
    for step in ("nothing_to_stop", "status_stopped"):
        assert story[step]["code"] == 2
        assert story[step]["err"].startswith("phasor: error: ray_address='127.0.0.1:")
        assert story[step]["err"].count("\n") == 1


def test_without_detach_the_deployment_ends_with_its_command(story):
    assert story["attached"]["healthy"] == [True, True]
    assert "no fleet runs there" in story["status_attached"]["err"]
    assert story["gone"]["left"] == []
