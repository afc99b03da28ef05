"""Bring up a whole deployment and keep it up: Ray, the fleet of workers, and the router.

`serve` holds all of it in place until a signal; `serve_detached` leaves it in a running cluster. Neither
touches
requests: those go client -> router -> workers over gRPC.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from phasor.core.config import ServingConfig
from phasor.core.errors import ConfigError, WorkerLostError
from phasor.deploy.actors import (
    ROUTER_NAME,
    find_actor,
    follow_fleet,
    router_members,
    start_fleet,
    start_router,
    stop_fleet,
    stop_router,
)
from phasor.deploy.display import Display, describe_members
from phasor.deploy.fleet import FLEET_NAME
from phasor.deploy.fleet_state import FleetPolicy, Member, MemberState, Role
from phasor.deploy.placement import check_fleet, check_hosts, local_resources
from phasor.deploy.ray_calls import CALL_TIMEOUT_S, call, in_thread
from phasor.deploy.ray_local import LocalRay, connect, disconnect, num_hosts
from phasor.v1 import inference_pb2, inference_pb2_grpc
from phasor.wire.channels import connect as connect_grpc

_MODEL_TIMEOUT_S = 3600.0  # a download; progress is shown
_VISIBLE_TIMEOUT_S = 15.0
_ASK_TIMEOUT_S = 2.0
_ROUTER_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """What runs, once it is ready."""

    address: str
    """Where clients connect, host:port."""
    config: ServingConfig
    """As it was resolved: the model's folder, the served name."""
    info: inference_pb2.GetServerInfoResponse
    """The router's own account at the moment it became ready."""


async def serve(config: ServingConfig, *, display: Display) -> None:
    """Bring everything up, say so, and run until SIGINT or SIGTERM; then stop in good order.

    A second signal ends every process of ours at once. Nothing is left behind in either case.

    Raises:
        ConfigError: something can never work like this (model, port, memory, cluster).
        WorkerLostError: Ray or a worker was not ready within `config.fleet.start_timeout_s`.
    """
    stack = LocalStack()

    async def run() -> None:
        async with deployment(config, display=display, stack=stack) as running:
            announce(running, display)
            if stack.ray is not None:
                display.say(
                    f"Logs, until it ends: {stack.ray.folder}/ray/session_latest/logs. Ctrl-C ends it."
                )
            await asyncio.get_running_loop().create_future()  # until a signal cancels this task

    await until_signal(run(), force=stack.kill, display=display)
    display.say("Stopped.")


class LocalStack:
    """The Ray that a deployment started on this machine, if any. Outlives it, for a last look."""

    def __init__(self) -> None:
        self.ray: LocalRay | None = None
        self.left_behind: list[int] = []
        """Pids that survived the stop."""

    def kill(self) -> None:
        """End every process of our Ray now. For a signal handler's last resort."""
        if self.ray is not None:
            self.ray.kill()


@asynccontextmanager
async def deployment(
    config: ServingConfig,
    *,
    display: Display,
    stack: LocalStack | None = None,
    classes: Mapping[Role, type] | None = None,
    policy: FleetPolicy | None = None,
) -> AsyncIterator[Deployment]:
    """Hold a deployment up: ready when entered, gone without a trace when left.

    Args:
        config: the whole tree.
        display: where progress is shown.
        stack: is told of the local Ray, for `kill` and for a look at what is left.
        classes: other actor classes than the real workers (tests).
        policy: other deadlines and backoff than the defaults.

    Raises:
        ConfigError: something can never work like this.
        WorkerLostError: Ray or a worker was not ready in time.
    """
    from phasor.router.server import RouterServer

    check_fleet(config)
    async with AsyncExitStack() as cleanup:
        # The router first: a port in use shows in milliseconds, not after the model is loaded.
        router = RouterServer(config.router)
        cleanup.push_async_callback(router.stop, _ROUTER_GRACE_S)
        address = await router.start()
        config = await resolve(config, display=display)
        await _join_ray(config, cleanup, display, stack or LocalStack())
        with display.stage(_workers_title(config)) as detail:
            fleet = await start_fleet(config, classes=classes, policy=policy)
            cleanup.push_async_callback(stop_fleet, fleet)
            members = await _wait_ready(fleet, config.fleet.start_timeout_s, detail)
        router.set_members(router_members(members))
        info = await wait_visible(address, num_workers=len(members))
        following = asyncio.create_task(
            follow_fleet(
                fleet, router.set_members, on_change=lambda found: display.say(describe_members(found))
            )
        )
        cleanup.push_async_callback(_cancel, following)
        # Once more, to come first: requests end before the workers do. The second time does nothing.
        cleanup.push_async_callback(router.stop, _ROUTER_GRACE_S)
        yield Deployment(address, config, info)


async def serve_detached(
    config: ServingConfig,
    *,
    display: Display,
    replace: bool = False,
    classes: Mapping[Role, type] | None = None,
) -> None:
    """Leave a deployment in a running cluster and return once it is ready. Idempotent for an equal `config`.

    Args:
        config: the whole tree; `fleet.ray_address` names the cluster.
        display: where progress is shown.
        replace: end a deployment with another configuration first, instead of refusing.
        classes: other actor classes than the real workers (tests).

    Raises:
        ConfigError: no cluster is named, another deployment runs there, or something can never work like
        this.
        WorkerLostError: not ready in time; what was started is stopped again.
    """
    check_fleet(config)
    if not config.fleet.ray_address:
        raise ConfigError(
            "fleet.ray_address", "", "--detach needs a running cluster to stay in: --ray-address auto"
        )
    await connect(config.fleet.ray_address, environment={})
    try:
        check_hosts(config, num_hosts=await num_hosts())
        config = await resolve(config, display=display)
        address = await _running_address(config, replace=replace)
        if address is None:
            address = await _start_detached(config, display, classes)
        announce(Deployment(address, config, await wait_visible(address, num_workers=1)), display)
    finally:
        await disconnect()


async def resolve(config: ServingConfig, *, display: Display) -> ServingConfig:
    """Return `config` with the model's folder (fetched if need be) and its served name filled in."""
    from phasor.deploy.cli_output import fetch_progress
    from phasor.engine.model_source import resolve_model

    name = config.model.path
    with fetch_progress(display.console, name) as progress:
        folder = await in_thread(
            lambda: resolve_model(name, progress=progress),
            timeout_s=_MODEL_TIMEOUT_S,
            what=f"fetching the model {name}",
        )
    served = config.model.served_name or Path(name).name
    return config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(folder), "served_name": served})}
    )


async def wait_visible(address: str, *, num_workers: int) -> inference_pb2.GetServerInfoResponse:
    """Ask the router itself until it serves with `num_workers` healthy workers; return its account.

    Raises:
        WorkerLostError: not within 15 s, though the workers said that they are ready.
    """
    last = "no answer"
    async with connect_grpc(reachable(address)) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        inference = inference_pb2_grpc.InferenceStub(channel)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_VISIBLE_TIMEOUT_S):
                while True:
                    try:
                        state = await health.Check(health_pb2.HealthCheckRequest(), timeout=_ASK_TIMEOUT_S)
                        info: inference_pb2.GetServerInfoResponse = await inference.GetServerInfo(
                            inference_pb2.GetServerInfoRequest(), timeout=_ASK_TIMEOUT_S
                        )
                    except grpc.aio.AioRpcError as exc:
                        last = exc.details() or exc.code().name
                    else:
                        healthy = sum(worker.healthy for worker in info.workers)
                        # SERVING comes after the tokenizer is loaded, which a healthy worker alone is not.
                        if state.status == health_pb2.HealthCheckResponse.SERVING and healthy >= num_workers:
                            return info
                        last = f"it sees {healthy} of {num_workers} workers"
                    await asyncio.sleep(0.1)
    raise WorkerLostError(f"the router at {address} is not ready after {_VISIBLE_TIMEOUT_S:g} s: {last}")


def reachable(address: str) -> str:
    """Return where a client on this host reaches a server bound to `address`."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "") else address


def announce(running: Deployment, display: Display) -> None:
    """Print what is served, where, with what room, and what to type next."""
    info, config = running.info, running.config
    address = reachable(running.address)
    counts = next((w.counts for w in info.workers if w.counts.num_blocks), None)
    if counts is not None:
        tokens = counts.num_blocks * config.kv.block_tokens
        display.say(
            f"KV pool of each worker: {config.kv.memory_bytes / 2**20:.0f} MiB = {counts.num_blocks} blocks "
            f"x {config.kv.block_tokens} tokens = {tokens} tokens"
        )
    if info.metrics_address:
        display.say(
            f"Metrics of the router, for Prometheus: http://{reachable(info.metrics_address)}/metrics"
        )
        for worker in info.workers:
            role = inference_pb2.WorkerRole.Name(worker.role).removeprefix("WORKER_ROLE_").lower()
            display.say(
                f"Metrics of the {role} worker {worker.address}: http://{worker.metrics_address}/metrics"
            )
    display.say(f"Serving {config.model.served_name} ({config.model.dtype}) at {running.address}")
    display.say(f"Try:  phasor chat --address {address}")


async def until_signal(
    work: Coroutine[Any, Any, None], *, force: Callable[[], None], display: Display
) -> None:
    """Run `work`; the first SIGINT or SIGTERM cancels it and waits for its clean-up, the second kills us.

    Args:
        work: its clean-up belongs in its `finally`.
        force: called before the process ends by force; must not block.
        display: where the stopping is announced.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    asked = 0

    def on_signal() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            display.say("Stopping (once more to force) ...")
            task.cancel()
        else:
            force()
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await task
    except asyncio.CancelledError:
        if not asked:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _join_ray(
    config: ServingConfig, cleanup: AsyncExitStack, display: Display, stack: LocalStack
) -> None:
    address, environment = config.fleet.ray_address, {}
    if not address:
        num_cpus, num_gpus = local_resources(config.fleet)
        local = stack.ray = LocalRay(num_cpus=num_cpus, num_gpus=num_gpus)

        async def stop_local() -> None:
            stack.left_behind = await local.stop()

        cleanup.push_async_callback(stop_local)
        with display.stage("Ray on this machine"):
            address = await local.start()
        environment = local.environment()
    cleanup.push_async_callback(disconnect)
    await connect(address, environment=environment)
    check_hosts(config, num_hosts=await num_hosts())


async def _wait_ready(fleet: Any, timeout_s: float, detail: Callable[[str], None]) -> list[Member]:
    members: list[Member] = []
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                members = await call(
                    fleet.members.remote(), timeout_s=CALL_TIMEOUT_S, what="asking the fleet"
                )
                detail(describe_members(members))
                if all(m.state is MemberState.READY for m in members):
                    return members
                if any(m.state is MemberState.FAILED for m in members):
                    error = await call(
                        fleet.fatal_error.remote(), timeout_s=CALL_TIMEOUT_S, what="asking the fleet"
                    )
                    raise error
                await asyncio.sleep(0.2)
    except TimeoutError as exc:
        raise WorkerLostError(
            f"workers not ready within {timeout_s:g} s: {describe_members(members)}"
        ) from exc


def _workers_title(config: ServingConfig) -> str:
    fleet = config.fleet
    return (
        f"{fleet.num_prefill} prefill and {fleet.num_decode} decode worker(s) of {config.model.served_name}"
    )


async def _running_address(config: ServingConfig, *, replace: bool) -> str | None:
    """Return the address of a detached deployment that equals `config`; None once there is none."""
    fleet, router = await find_actor(FLEET_NAME), await find_actor(ROUTER_NAME)
    if fleet is not None and router is not None:
        running = await call(fleet.config.remote(), timeout_s=CALL_TIMEOUT_S, what="asking the fleet")
        if running == config:
            return str(
                await call(router.address.remote(), timeout_s=CALL_TIMEOUT_S, what="asking the router")
            )
        if not replace:
            raise ConfigError(
                "fleet.ray_address",
                config.fleet.ray_address,
                "this cluster serves with another configuration; add --replace, or `phasor fleet stop` first",
            )
    # Both or neither: half a deployment is what an interrupted start or stop left.
    if router is not None:
        await stop_router(router, grace_s=_ROUTER_GRACE_S)
    if fleet is not None:
        await stop_fleet(fleet)
    return None


async def _start_detached(
    config: ServingConfig, display: Display, classes: Mapping[Role, type] | None
) -> str:
    async with AsyncExitStack() as undo:
        router = await start_router(config.router)
        undo.push_async_callback(stop_router, router, grace_s=0.0)
        address = str(
            await call(router.address.remote(), timeout_s=CALL_TIMEOUT_S, what="starting the router")
        )
        with display.stage(_workers_title(config)) as detail:
            fleet = await start_fleet(config, classes=classes)
            undo.push_async_callback(stop_fleet, fleet)
            members = await _wait_ready(fleet, config.fleet.start_timeout_s, detail)
        await wait_visible(address, num_workers=len(members))
        undo.pop_all()  # it stays
    return address


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
