"""Leave a deployment of stub workers in a Ray of its own, look at it, replace it, end it; report as JSON lines.

python -m tests.integration.detach_driver story
"""

import asyncio
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from phasor.core.config import FleetConfig, ModelConfig, RouterConfig, ServingConfig, WorkerConfig
from phasor.core.errors import ConfigError
from phasor.core.identity import Identity
from phasor.core.ids import Incarnation, new_incarnation
from phasor.deploy.display import Display
from phasor.deploy.ray_local import LocalRay
from phasor.deploy.serve import deployment, serve_detached
from phasor.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from phasor.wire.channels import new_server
from phasor.wire.convert import identity_to_pb
from tests.integration.fleet_driver import report

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny-code-256"
IDENTITY = Identity(
    weights_digest="0" * 64,
    adapter_digest="",
    k_dtype="float32",
    v_dtype="float32",
    layers=(0,),
    num_kv_heads=1,
    k_dim=8,
    v_dim=8,
    block_tokens=16,
    retention="full",
    rope_fingerprint="r",
    tier=1.0,
    position_basis="absolute",
    numerics_version=1,
    tenant_salt="",
)


class StubService(worker_pb2_grpc.WorkerServicer):
    """Says who it is and what it holds; serves no request."""

    def __init__(self, description: worker_pb2.WorkerDescription) -> None:
        self._description = description

    async def Describe(self, request: Any, context: Any) -> worker_pb2.WorkerDescription:
        return self._description

    async def GetCounts(self, request: Any, context: Any) -> inference_pb2.WorkerCounts:
        return inference_pb2.WorkerCounts(num_blocks=7, num_free_blocks=7)


class StubActor:
    """A worker that a router can see."""

    role = inference_pb2.WORKER_ROLE_UNSPECIFIED

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._incarnation = new_incarnation()

    async def start(self) -> tuple[str, Incarnation]:
        description = worker_pb2.WorkerDescription(
            role=self.role,
            incarnation=self._incarnation,
            ready=True,
            identity=identity_to_pb(IDENTITY),
            max_model_len=64,
            num_blocks=7,
            block_bytes=1024,
            served_name=self._config.model.served_name,
            model_folder=self._config.model.path,
            dtype="float32",
            max_running=4,
            pid=os.getpid(),
        )
        self._server = new_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(StubService(description), self._server)
        port = self._server.add_insecure_port(f"{self._config.host}:0")
        await self._server.start()
        return f"{self._config.host}:{port}", self._incarnation

    async def ping(self, hold_s: float) -> Incarnation:
        await asyncio.sleep(hold_s)
        return self._incarnation

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


class StubPrefill(StubActor):
    role = inference_pb2.WORKER_ROLE_PREFILL


class StubDecode(StubActor):
    role = inference_pb2.WORKER_ROLE_DECODE


def config(ray_address: str, **fleet: Any) -> ServingConfig:
    return ServingConfig(
        model=ModelConfig(path=str(TINY)),
        router=RouterConfig(port=0),
        fleet=FleetConfig(ray_address=ray_address, start_timeout_s=60.0, **fleet),
    )


async def detach(address: str, *, replace: bool = False, **fleet: Any) -> str:
    """Run `serve_detached` in this process; return what it printed, or the error."""
    import tests.integration.detach_driver as importable  # not __main__: other processes import the classes

    printed = io.StringIO()
    display = Display(Console(file=printed, width=200))
    classes = {"prefill": importable.StubPrefill, "decode": importable.StubDecode}
    try:
        await serve_detached(config(address, **fleet), display=display, replace=replace, classes=classes)
    except ConfigError as exc:
        return f"ConfigError: {exc}"
    return printed.getvalue()


def phasor(*args: str) -> dict[str, Any]:
    """Run a command of the command line in a process of its own."""
    command = [sys.executable, "-c", "from phasor.deploy.cli import main; main()", *args]
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


async def story() -> None:
    ray = LocalRay(num_cpus=3)
    address = await ray.start()
    try:
        # What env.sh does on a cluster's hosts: every driver finds mode and token in its environment.
        os.environ.update(ray.environment())
        report("nothing_to_stop", **phasor("fleet", "stop", "--ray-address", address))
        report("first", printed=await detach(address))
        report("status", **phasor("fleet", "status", "--ray-address", address))
        report("same_again", printed=await detach(address))
        report("another", printed=await detach(address, num_decode=2))
        report("replaced", printed=await detach(address, num_decode=2, replace=True))
        report("status_replaced", **phasor("fleet", "status", "--ray-address", address))
        report("stop", **phasor("fleet", "stop", "--ray-address", address))
        report("status_stopped", **phasor("fleet", "status", "--ray-address", address))
        await attached(address)
    finally:
        left = await ray.stop()
    report("gone", left=left)


async def attached(address: str) -> None:
    """Join the same Ray without --detach: the deployment ends with us, Ray does not."""
    import tests.integration.detach_driver as importable

    printed = io.StringIO()
    classes = {"prefill": importable.StubPrefill, "decode": importable.StubDecode}
    display = Display(Console(file=printed, width=200))
    began_s = time.monotonic()
    async with deployment(config(address), display=display, classes=classes) as running:
        healthy = [worker.healthy for worker in running.info.workers]
    seconds = time.monotonic() - began_s
    report("attached", healthy=healthy, printed=printed.getvalue(), seconds=seconds)
    report("status_attached", **phasor("fleet", "status", "--ray-address", address))


if __name__ == "__main__":
    asyncio.run(story())
