"""Run the fleet on a Ray of its own with stub workers, and report what happened as JSON lines.

A process of its own: Ray's settings are read once per process, and its driver leaves threads behind.

    python -m tests.integration.fleet_driver story|orphan
"""

import asyncio
import json
import os
import signal
import stat
import sys
import time
from typing import Any

import psutil

from phasor.core.config import FleetConfig, ServingConfig, WorkerConfig
from phasor.core.errors import ConfigError
from phasor.core.ids import Incarnation, new_incarnation
from phasor.deploy.actors import FLEET_NAME, find_actor, start_fleet, stop_fleet
from phasor.deploy.fleet_state import FleetPolicy, MemberState
from phasor.deploy.placement import local_resources
from phasor.deploy.ray_calls import call
from phasor.deploy.ray_local import LocalRay, connect, disconnect

WAIT_S = 60.0
POLICY = FleetPolicy(start_timeout_s=60.0, first_backoff_s=0.1, max_missed_pings=1)


class StubActor:
    """Answers like a worker's actor; its "address" tells its pid."""

    def __init__(self, config: WorkerConfig) -> None:
        self._incarnation = new_incarnation()

    async def start(self) -> tuple[str, Incarnation]:
        return f"pid:{os.getpid()}", self._incarnation

    async def ping(self, hold_s: float) -> Incarnation:
        await asyncio.sleep(hold_s)
        return self._incarnation

    async def stop(self, grace_s: float) -> None:
        return None


class HopelessActor(StubActor):
    """Can never start."""

    async def start(self) -> tuple[str, Incarnation]:
        raise ConfigError("model.path", "/nowhere", "no such folder")


def report(step: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"step": step, **facts}) + "\n")
    sys.stdout.flush()


async def members(fleet: Any) -> list[dict[str, Any]]:
    found = await call(fleet.members.remote(), timeout_s=10.0, what="asking the fleet")
    return [
        {
            "slot": m.slot,
            "role": m.role,
            "state": str(m.state),
            "address": m.address,
            "incarnation": m.incarnation,
        }
        for m in found
    ]


async def until_ready(fleet: Any, *, without: set[str] = frozenset()) -> list[dict[str, Any]]:
    """Wait until all members are ready and none has an incarnation of `without`."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                found = await members(fleet)
            except Exception as exc:
                sys.stderr.write(f"fleet does not answer: {exc}\n")
                found = []
            fresh = all(m["state"] == MemberState.READY and m["incarnation"] not in without for m in found)
            if found and fresh:
                return found
            await asyncio.sleep(0.1)


def pid_of(found: list[dict[str, Any]], slot: str) -> int:
    return next(int(m["address"].removeprefix("pid:")) for m in found if m["slot"] == slot)


def incarnation_of(found: list[dict[str, Any]], slot: str) -> str:
    return next(m["incarnation"] for m in found if m["slot"] == slot)


def listening(pids: frozenset[int]) -> list[str]:
    """Return the hosts that these processes listen on."""
    return sorted(
        {c.laddr.ip for c in psutil.net_connections("inet") if c.pid in pids and c.status == "LISTEN"}
    )


def fleet_pid(pids: frozenset[int]) -> int:
    return next(pid for pid in pids if psutil.Process(pid).cmdline()[:1] == ["ray::Fleet"] or _is_fleet(pid))


def _is_fleet(pid: int) -> bool:
    return psutil.Process(pid).name().startswith("ray::Fleet")


async def story() -> None:
    config = ServingConfig(fleet=FleetConfig(num_prefill=1, num_decode=1))
    num_cpus, _ = local_resources(config.fleet)
    ray = LocalRay(num_cpus=num_cpus)
    began_s = time.monotonic()
    address = await ray.start()
    folder = ray.folder
    try:
        report("ray", address=address, seconds=time.monotonic() - began_s, num_processes=len(ray.pids))
        modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in (".", "token")}
        report("private", modes=modes)
        await connect(address, environment=ray.environment())
        fleet = await start_fleet(config, policy=POLICY, classes={"prefill": StubActor, "decode": StubActor})
        found = await until_ready(fleet)
        report("ready", members=found)
        report("listening", hosts=listening(ray.pids))
        await failures(ray, fleet, config, found)
        await stop_fleet(fleet)
        report("stopped", fleet_found=await find_actor(FLEET_NAME) is not None)
        await hopeless(config)
        await disconnect()
    finally:
        pids = ray.pids
        left = await ray.stop()
    report("gone", left=left, alive=[pid for pid in pids if psutil.pid_exists(pid)], folder=folder.exists())
    report("children", pids=[p.pid for p in psutil.Process().children(recursive=True)])


async def failures(ray: LocalRay, fleet: Any, config: ServingConfig, found: list[dict[str, Any]]) -> None:
    try:
        await start_fleet(config)
    except ConfigError as exc:
        report("second_fleet", error=str(exc))

    os.kill(pid_of(found, "decode-0"), signal.SIGKILL)
    after = await until_ready(fleet, without={incarnation_of(found, "decode-0")})
    report("killed", before=found, after=after)

    silent = pid_of(after, "prefill-0")
    os.kill(silent, signal.SIGSTOP)
    again = await until_ready(fleet, without={incarnation_of(after, "prefill-0")})
    report("silent", before=after, after=again)

    other = LocalRay(num_cpus=1)
    second = await other.start()
    left = await other.stop()
    report("side_by_side", addresses=[ray.address, second], left=left, members=await members(fleet))

    os.kill(fleet_pid(ray.pids), signal.SIGKILL)
    final = await until_ready(fleet, without={m["incarnation"] for m in again})
    report("fleet_killed", before=again, after=final)


async def hopeless(config: ServingConfig) -> None:
    fleet = await start_fleet(config, policy=POLICY, classes={"prefill": StubActor, "decode": HopelessActor})
    async with asyncio.timeout(WAIT_S):
        while True:
            if any(m["state"] == "failed" for m in await members(fleet)):
                break
            await asyncio.sleep(0.1)
    error = await call(fleet.fatal_error.remote(), timeout_s=10.0, what="asking the fleet")
    report("hopeless", type=type(error).__name__, message=str(error), field=error.field)
    await stop_fleet(fleet)


async def orphan() -> None:
    ray = LocalRay(num_cpus=1)
    await ray.start()
    report("orphan", pids=sorted(ray.pids), folder=str(ray.folder))
    await asyncio.sleep(WAIT_S)


if __name__ == "__main__":
    # Pickled by reference, so the classes must be found under this module's importable name.
    import tests.integration.fleet_driver as driver

    asyncio.run(getattr(driver, sys.argv[1])())
