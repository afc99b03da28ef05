"""`phasor serve` as a user runs it: a private Ray, real workers on the tiny model, signals, nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.calls import generate, greedy

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "tiny-code-256"
PHASOR = [sys.executable, "-c", "from phasor.deploy.cli import main; main()"]
START_S = 150.0


@contextmanager
def serving(*args: str) -> Iterator[tuple["subprocess.Popen[str]", str, str]]:
    """Run `phasor serve` on a free port; yield the process, its address, and what it printed until ready."""
    command = [*PHASOR, "serve", "--model", str(TINY), "--port", "0"]
    command += ["--kv-memory", "16MiB", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert process.stdout is not None
    printed, address = "", ""
    deadline_s = time.monotonic() + START_S
    try:
        for line in process.stdout:
            printed += line
            if line.startswith("Serving "):
                address = line.split(" at ")[1].strip()
            if line.startswith("Try:"):
                break
            assert time.monotonic() < deadline_s, printed
        assert address, f"phasor serve ended before it was ready:\n{printed}"
        yield process, address, printed
    finally:
        family = family_of(process)
        process.kill()
        process.wait(10)
        process.stdout.close()
        psutil.wait_procs(family, timeout=20)


def family_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def test_one_command_serves_and_a_signal_ends_all_of_it():
    with serving() as (process, address, printed):
        assert "KV pool of each worker: 16 MiB = " in printed
        assert "Serving tiny-code-256 (float32)" in printed
        reply = generate(address, "def main():\n", greedy(8))
        assert reply.usage.completion_tokens == len(reply.token_ids) == 8
        assert reply.usage.transferred_tokens == reply.usage.prompt_tokens > 0

        killed = next(p for p in family_of(process) if p.name().startswith("ray::PrefillActor"))
        os.kill(killed.pid, signal.SIGKILL)
        again = until_answered(address)
        assert again.token_ids == reply.token_ids

        family = family_of(process)
        assert len(family) >= 5
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 0
        rest = process.stdout.read()
        assert rest.splitlines()[-1] == "Stopped.", rest
        _, alive = psutil.wait_procs(family, timeout=5)
        assert [p.cmdline() for p in alive] == []


def until_answered(address: str):
    """Ask until a restarted worker serves; each failure must be a clear status, not a hang."""
    import grpc

    deadline_s = time.monotonic() + 60
    while True:
        try:
            return generate(address, "def main():\n", greedy(8), timeout_s=20)
        except grpc.RpcError as exc:
            assert exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED), exc
            assert time.monotonic() < deadline_s, exc
            time.sleep(0.5)


def test_a_second_signal_ends_it_by_force():
    with serving() as (process, _, _):
        family = family_of(process)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        code = process.wait(20)
        assert code in (0, 130)
        _, alive = psutil.wait_procs(family, timeout=20)
        assert [p.cmdline() for p in alive] == []


def run_serve(*args: str, timeout_s: float = 150.0) -> "subprocess.CompletedProcess[str]":
    command = [*PHASOR, "serve", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT)


def test_a_port_in_use_is_refused_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_serve("--model", str(TINY), "--port", str(port), timeout_s=30.0)
    assert done.returncode == 2
    assert done.stderr.strip() == f"phasor: error: router.port={port}: in use; choose another with --port"
    assert "Ray" not in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "/nowhere"), "phasor: error: model"),
        (("--model", str(TINY), "--kv-memory", "4KiB"), "phasor: error: kv.memory_bytes=4096: "),
        (("--model", str(TINY), "--max-model-len", "100000"), "phasor: error: model.max_model_len=100000: "),
    ],
    ids=["no such model", "too little memory", "too long"],
)
def test_what_can_never_work_is_exit_code_2_and_one_line(args, message):
    done = run_serve(*args, "--port", "0")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
