"""Phasor as real processes on loopback: workers and router started the way a user would, without Ray."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from phasor.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

START_S = 90.0
ROOT = Path(__file__).parents[2]


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

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        if self.popen.poll() is None:
            self.thaw()
            self.popen.terminate()

    def stop(self, timeout_s: float = 15.0) -> int:
        """SIGTERM, then wait; SIGKILL and fail if it does not end by itself."""
        self.terminate()
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


def spawn(module: str, *args: str) -> Process:
    """Start `python -m module args`; `await_ready` next, or `stop` it."""
    log = Path(tempfile.mkdtemp(prefix="phasor-test-"), f"{module}.log")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", module, *args]
    with log.open("w", encoding="utf-8") as stderr:
        popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env, cwd=ROOT)
    return Process(popen, log)


def await_ready(process: Process) -> None:
    """Wait for the ready line of a spawned process; kill it and fail if none comes."""
    popen = process.popen
    assert popen.stdout is not None
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if select.select([popen.stdout], [], [], 0.2)[0]:
            line = popen.stdout.readline()
            if line:
                process.ready = json.loads(line)
                return
        if popen.poll() is not None:
            raise AssertionError(f"{popen.args!r} ended with {popen.returncode}:\n{process.output()}")
    process.kill()
    raise AssertionError(f"{popen.args!r} was not ready within {START_S} s:\n{process.output()}")


def start(module: str, *args: str) -> Process:
    """Start `python -m module args` and wait for its ready line."""
    process = spawn(module, *args)
    try:
        await_ready(process)
    except BaseException:
        process.stop()
        raise
    return process


def stop_all(processes: Sequence[Process]) -> None:
    """Stop processes side by side; every one is waited for, then the first that did not end by itself is told."""
    for process in processes:
        process.terminate()
    failures = []
    for process in processes:
        try:
            process.stop()
        except AssertionError as exc:
            failures.append(exc)
    if failures:
        raise failures[0]


@dataclass
class Cluster:
    """A running router with its workers."""

    router: Process
    prefill: list[Process]
    decode: list[Process]

    @property
    def address(self) -> str:
        return self.router.address

    @property
    def workers(self) -> list[Process]:
        return [*self.prefill, *self.decode]

    def router_counts(self) -> inference_pb2.RouterCounts:
        with grpc.insecure_channel(self.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            info: inference_pb2.GetServerInfoResponse = stub.GetServerInfo(
                inference_pb2.GetServerInfoRequest(), timeout=5
            )
            return info.counts

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

    def router_held(self) -> dict[str, int]:
        """What the router must hold nothing of when idle."""
        counts = self.router_counts()
        return {"requests": counts.num_in_flight, "leases": counts.num_leases}

    def wait_baseline(self, *processes: Process, timeout_s: float = 2.0) -> None:
        """Assert that every count of the processes and of the router is 0 within `timeout_s` (invariant 7).

        All workers are looked at when none is named.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            held = [*(self.held(process) for process in processes or self.workers), self.router_held()]
            if not any(any(h.values()) for h in held):
                return
            assert time.monotonic() < deadline_s, f"still held after {timeout_s} s: {held}"
            time.sleep(0.05)


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait for something that has no event of its own."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"never came: {what}"
        time.sleep(0.005)


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
    prefill_args: Sequence[str] = (),
    decode_args: Sequence[str] = (),
    router_args: Sequence[str] = (),
    prefill_module: str = "phasor.prefill_worker",
    decode_module: str = "phasor.decode_worker",
) -> Iterator[Cluster]:
    """Start workers and router over the model in `folder`; stop them all at the end, whatever happened.

    Args:
        folder: the model.
        num_prefill: how many prefill workers.
        num_decode: how many decode workers.
        worker_args: options of all workers.
        prefill_args: options of prefill workers only.
        decode_args: options of decode workers only.
        router_args: options of the router.
        prefill_module: what to run as prefill worker; a test may bring one of its own with faults in it.
        decode_module: the same for decode workers.
    """
    workers: list[Process] = []
    prefill: list[Process] = []
    decode: list[Process] = []
    routers: list[Process] = []
    try:
        common = ["--model", str(folder), *worker_args]
        prefill += [spawn(prefill_module, *common, *prefill_args) for _ in range(num_prefill)]
        workers.extend(prefill)
        decode += [spawn(decode_module, *common, *decode_args) for _ in range(num_decode)]
        workers.extend(decode)
        for process in workers:
            await_ready(process)
        members = [a for p in prefill for a in ("--prefill", p.address)]
        members += [a for d in decode for a in ("--decode", d.address)]
        routers.append(start("phasor.router", "--port", "0", *members, *router_args))
        wait_serving(routers[0].address)
        if num_prefill:
            wait_ready_workers(routers[0].address, num_prefill + num_decode)
        yield Cluster(routers[0], prefill, decode)
    finally:
        # The router first: it would report the loss of each worker otherwise.
        try:
            stop_all(routers)
        finally:
            # What a test started in the place of another is stopped too.
            stop_all(list({id(process): process for process in [*workers, *prefill, *decode]}.values()))


def wait_ready_workers(address: str, count: int, timeout_s: float = 30.0) -> None:
    """Wait until the router sees `count` healthy workers."""
    deadline_s = time.monotonic() + timeout_s
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        while time.monotonic() < deadline_s:
            info = stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=5)
            if sum(worker.healthy for worker in info.workers) == count:
                return
            time.sleep(0.1)
    raise AssertionError(f"{address} did not see {count} healthy workers within {timeout_s} s")
