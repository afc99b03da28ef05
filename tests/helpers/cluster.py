"""Phasor as real processes on loopback: workers and router started the way a user would, without Ray."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from phasor.v1 import inference_pb2, worker_pb2, worker_pb2_grpc

START_S = 90.0


@dataclass
class Process:
    """One started program that printed its ready line."""

    popen: "subprocess.Popen[str]"
    log: Path
    ready: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.ready["address"]

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)

    def freeze(self) -> None:
        self.popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.popen.send_signal(signal.SIGCONT)

    def stop(self, timeout_s: float = 15.0) -> int:
        """SIGTERM, then wait; SIGKILL and fail if it does not end by itself."""
        if self.popen.poll() is None:
            self.thaw()
            self.popen.terminate()
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.popen.args!r} did not end on SIGTERM:\n{self.output()}") from None
        finally:
            if self.popen.stdout is not None:
                self.popen.stdout.close()

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]


def start(module: str, *args: str) -> Process:
    """Start `python -m module args` and wait for its ready line."""
    log = Path(tempfile.mkdtemp(prefix="phasor-test-"), f"{module}.log")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", module, *args]
    with log.open("w", encoding="utf-8") as stderr:
        popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)
    process = Process(popen, log)
    assert popen.stdout is not None
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if select.select([popen.stdout], [], [], 0.2)[0]:
            line = popen.stdout.readline()
            if line:
                process.ready = json.loads(line)
                return process
        if popen.poll() is not None:
            raise AssertionError(f"{module} ended with {popen.returncode}:\n{process.output()}")
    process.kill()
    raise AssertionError(f"{module} was not ready within {START_S} s:\n{process.output()}")


@dataclass
class Cluster:
    """A running router with its workers."""

    router: Process
    prefill: list[Process]
    decode: list[Process]

    @property
    def address(self) -> str:
        return self.router.address

    def counts(self, process: Process) -> inference_pb2.WorkerCounts:
        with grpc.insecure_channel(process.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            counts: inference_pb2.WorkerCounts = stub.GetCounts(worker_pb2.GetCountsRequest(), timeout=5)
            return counts

    def held(self, process: Process) -> dict[str, int]:
        """What must be 0 when idle."""
        counts = self.counts(process)
        return {
            "blocks": counts.num_blocks - counts.num_free_blocks,
            "running": counts.num_running,
            "waiting": counts.num_waiting,
            "tickets": counts.num_open_tickets,
            "staging": counts.staging_bytes,
            "leaked": counts.num_leaked_blocks,
        }

    def wait_baseline(self, *processes: Process, timeout_s: float = 2.0) -> None:
        """Assert that every count of the processes is back at 0 within `timeout_s` (invariant 7)."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            held = [self.held(process) for process in processes]
            if not any(any(h.values()) for h in held):
                return
            assert time.monotonic() < deadline_s, f"still held after {timeout_s} s: {held}"
            time.sleep(0.05)


def wait_serving(address: str, timeout_s: float = 30.0) -> None:
    """Wait until the router's health check says SERVING."""
    deadline_s = time.monotonic() + timeout_s
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline_s:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.1)
    raise AssertionError(f"{address} was not SERVING within {timeout_s} s")


@contextmanager
def cluster(
    folder: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    worker_args: Sequence[str] = (),
    router_args: Sequence[str] = (),
) -> Iterator[Cluster]:
    """Start workers and router over the model in `folder`; stop them all at the end, whatever happened."""
    started: list[Process] = []
    try:
        common = ["--model", str(folder), *worker_args]
        prefill = [start("phasor.prefill_worker", *common) for _ in range(num_prefill)]
        started.extend(prefill)
        decode = [start("phasor.decode_worker", *common) for _ in range(num_decode)]
        started.extend(decode)
        members = [a for p in prefill for a in ("--prefill", p.address)]
        members += [a for d in decode for a in ("--decode", d.address)]
        router = start("phasor.router", "--port", "0", *members, *router_args)
        started.append(router)
        wait_serving(router.address)
        if num_prefill:
            wait_ready_workers(router.address, num_prefill + num_decode)
        yield Cluster(router, prefill, decode)
    finally:
        for process in reversed(started):
            process.stop()


def wait_ready_workers(address: str, count: int, timeout_s: float = 30.0) -> None:
    """Wait until the router sees `count` healthy workers."""
    from phasor.v1 import inference_pb2_grpc

    deadline_s = time.monotonic() + timeout_s
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        while time.monotonic() < deadline_s:
            info = stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=5)
            if sum(worker.healthy for worker in info.workers) == count:
                return
            time.sleep(0.1)
    raise AssertionError(f"{address} did not see {count} healthy workers within {timeout_s} s")
