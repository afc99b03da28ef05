"""The fleet on a real Ray of its own, with stub workers: placed, killed, silent, replaced, and gone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tests.integration.fleet_driver"]


def by_slot(members: list[dict[str, Any]]) -> dict[str, str]:
    return {member["slot"]: member["incarnation"] for member in members}


@pytest.fixture(scope="module")
def story() -> dict[str, dict[str, Any]]:
    """Run the driver's whole story once; its steps by name."""
    done = subprocess.run(
        [*COMMAND, "story"], cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-4000:]
    return {step["step"]: step for step in steps}


def test_ray_is_light_private_and_on_loopback_only(story):
    assert story["ray"]["num_processes"] <= 6
    assert story["private"]["modes"] == {".": 0o700, "token": 0o600}
    assert story["ray"]["address"].startswith("127.0.0.1:")
    assert set(story["listening"]["hosts"]) <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_every_worker_gets_ready_under_its_own_incarnation(story):
    members = story["ready"]["members"]
    assert [(m["slot"], m["role"], m["state"]) for m in members] == [
        ("decode-0", "decode", "ready"),
        ("prefill-0", "prefill", "ready"),
    ]
    assert len({m["incarnation"] for m in members}) == len({m["address"] for m in members}) == 2


def test_a_second_fleet_in_one_cluster_is_refused(story):
    assert "runs a fleet already" in story["second_fleet"]["error"]


def test_a_killed_worker_is_replaced_and_the_other_left_alone(story):
    before, after = by_slot(story["killed"]["before"]), by_slot(story["killed"]["after"])
    assert before["decode-0"] != after["decode-0"]
    assert before["prefill-0"] == after["prefill-0"]


def test_a_silent_worker_is_replaced(story):
    before, after = by_slot(story["silent"]["before"]), by_slot(story["silent"]["after"])
    assert before["prefill-0"] != after["prefill-0"]
    assert before["decode-0"] == after["decode-0"]


def test_two_rays_on_one_machine_do_not_disturb_each_other(story):
    step = story["side_by_side"]
    assert len(set(step["addresses"])) == 2
    assert step["left"] == []
    assert by_slot(step["members"]) == by_slot(story["silent"]["after"])


def test_a_killed_fleet_comes_back_and_finds_room_for_new_workers(story):
    before, after = by_slot(story["fleet_killed"]["before"]), by_slot(story["fleet_killed"]["after"])
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())


def test_a_wrong_configuration_reaches_the_caller_as_it_was_raised(story):
    step = story["hopeless"]
    assert (step["type"], step["field"]) == ("ConfigError", "model.path")
    assert step["message"] == "model.path='/nowhere': no such folder"


def test_nothing_is_left_behind(story):
    assert story["stopped"]["fleet_found"] is False
    assert story["gone"] == {"step": "gone", "left": [], "alive": [], "folder": False}
    assert story["children"]["pids"] == []


def test_ray_does_not_outlive_a_parent_killed_with_sigkill():
    driver = subprocess.Popen(
        [*COMMAND, "orphan"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        step = json.loads(driver.stdout.readline())
    finally:
        driver.kill()
        driver.wait(10)
        driver.stdout.close()
    processes = [psutil.Process(pid) for pid in step["pids"] if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert [process.cmdline() for process in alive] == []
    assert not Path(step["folder"]).exists()


def test_a_dead_address_is_refused_within_its_deadline():
    code = (
        "import asyncio; from phasor.deploy.ray_local import connect\n"
        "asyncio.run(connect('127.0.0.1:1', environment={}, timeout_s=3.0))"
    )
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 1
    assert "ConfigError: fleet.ray_address='127.0.0.1:1': cannot join this Ray" in done.stderr
    assert time.monotonic() - began_s < 60
