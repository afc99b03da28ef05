"""Phasor's processes on loopback for benchmarks, started as `python -m` starts them; gone when the benchmark ends."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import IO, Any

import grpc
import harness

from phasor.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from phasor.wire.channels import connect_sync

START_S, STOP_S, CALL_S = 90.0, 15.0, 300.0


class Servers:
    """Starts processes and channels, and ends all of them on leaving the `with` block."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._channels: list[grpc.Channel] = []
        self._ending = ExitStack()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            channel.close()
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
        self._ending.close()

    def start(self, *commands: Sequence[str]) -> list[str]:
        """Run `python ...` for each of `commands` side by side; returns the addresses that they print when ready."""
        return [ready["address"] for ready in self.start_ready(*commands)]

    def start_ready(self, *commands: Sequence[str]) -> list[dict[str, str]]:
        """Do as `start` does; returns all that they print when ready."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        started = []
        for command in commands:
            log = self._ending.enter_context(_new_log())
            process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
                cwd=harness.REPOSITORY,
            )
            self._processes.append(process)
            started.append((process, log))
        lines = []
        for process, log in started:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                log.seek(0)
                raise SystemExit(f"{process.args!r} did not start:\n{log.read()[-3000:]}")
            lines.append(json.loads(line))
        return lines

    def last_process(self) -> "subprocess.Popen[str]":
        """Return the process started last, to talk to."""
        return self._processes[-1]

    def worker(self, address: str) -> Any:
        """Open a Worker stub."""
        return worker_pb2_grpc.WorkerStub(self._channel(address))

    def inference(self, address: str) -> Any:
        """Open an Inference stub, and wait until the router behind it has heard of all its workers."""
        stub: Any = inference_pb2_grpc.InferenceStub(self._channel(address))
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                info = stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=5)
                if info.workers and all(worker.healthy for worker in info.workers):
                    return stub
            except grpc.RpcError as exc:
                if exc.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the router at {address} found no healthy workers in {START_S:.0f} s")
            time.sleep(0.1)

    def _channel(self, address: str) -> grpc.Channel:
        channel = connect_sync(address)
        self._channels.append(channel)
        return channel


def _new_log() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def worker_command(role: str, model: str, *options: str) -> list[str]:
    """Return the command line of a worker; `role` is "prefill" or "decode"."""
    return ["-m", f"phasor.{role}_worker", "--model", model, *options]


def router_command(*, prefill: Sequence[str] = (), decode: Sequence[str] = ()) -> list[str]:
    """Return the command line of a router over workers that run."""
    members = [part for address in prefill for part in ("--prefill", address)]
    members += [part for address in decode for part in ("--decode", address)]
    return ["-m", "phasor.router", "--port", "0", "--log-level", "warning", *members]


def generate_request(token_ids: Sequence[int], max_tokens: int) -> inference_pb2.GenerateRequest:
    """Return a greedy request for exactly `max_tokens` tokens."""
    sampling = inference_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=token_ids), sampling=sampling, timeout_s=CALL_S
    )


def describe(stub: Any) -> worker_pb2.WorkerDescription:
    """Ask a worker who it is."""
    description: worker_pb2.WorkerDescription = stub.Describe(worker_pb2.DescribeRequest(), timeout=30)
    return description
