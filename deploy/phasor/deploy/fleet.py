"""The fleet as a detached Ray actor: places workers, starts them, watches them, starts them again.

A shell around `fleet_state`: it turns instructions into Ray calls and what comes of them into events.
Requests never pass through here, and routers do not wait for it to notice a death: gRPC keepalive is faster.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from phasor.core.config import ServingConfig
from phasor.core.errors import ConfigError, PhasorError, WorkerLostError
from phasor.core.logs import configure_logging
from phasor.deploy.fleet_state import (
    Event,
    FleetPolicy,
    FleetState,
    Instruction,
    KillWorker,
    Member,
    PingAnswered,
    PingMissed,
    Role,
    Shutdown,
    StartFailed,
    StartWorker,
    StopWorker,
    Tick,
    WorkerDied,
    WorkerReady,
    WorkerStopped,
)
from phasor.deploy.placement import at_host, check_fleet, roles, worker_placement
from phasor.deploy.ray_calls import CALL_TIMEOUT_S, call, first_line, in_thread

FLEET_NAME = "Fleet"
"""The actor's name in Ray's namespace "phasor"."""

_GROUP_PREFIX = "phasor/"
_PING_HOLD_S = 1.0
_PING_TIMEOUT_S = 4.0
_STOP_GRACE_S = 2.0
_STOP_TIMEOUT_S = 8.0

_log = logging.getLogger(__name__)


def worker_classes() -> dict[Role, type]:
    """Return the classes that become Ray actors, by role."""
    from phasor.decode_worker.actor import DecodeActor
    from phasor.prefill_worker.actor import PrefillActor

    return {"prefill": PrefillActor, "decode": DecodeActor}


class _Launch:
    """One attempt of one slot, and what it holds in Ray. `discard` gives all of it back, at any moment."""

    def __init__(self, slot: str, launch: int) -> None:
        self.slot, self.launch = slot, launch
        self.actor: Any = None
        self.group: Any = None
        self.task: asyncio.Task[None] | None = None
        self.discarded = False

    def discard(self) -> None:
        """Kill the actor and remove its placement group. Idempotent; blocks for a round trip to the GCS."""
        import ray
        import ray.util

        self.discarded = True
        actor, self.actor = self.actor, None
        group, self.group = self.group, None
        # The actor may be dead, and the cluster may be going down: both are what we want.
        with contextlib.suppress(Exception):
            if actor is not None:
                ray.kill(actor, no_restart=True)
        with contextlib.suppress(Exception):
            if group is not None:
                ray.util.remove_placement_group(group)


class Fleet:
    """The workers of one deployment. Made an actor by `start_fleet`; one per cluster.

    Ray calls `__init__` again when this process or its host died. The workers died with it (Ray ends what a
    dead actor owns), so the new fleet starts all of them as new incarnations.

    Args:
        config: the whole tree; `model.path` is a folder on every host.
        policy: deadlines and backoff; by default with `config.fleet.start_timeout_s`.
        classes: the actor class of each role; None takes `worker_classes()`.
    """

    def __init__(
        self,
        config: ServingConfig,
        policy: FleetPolicy | None = None,
        classes: Mapping[Role, type] | None = None,
    ) -> None:
        configure_logging(config.router.log_format)
        check_fleet(config)
        self._config = config
        self._classes = dict(classes) if classes is not None else worker_classes()
        self._policy = policy or FleetPolicy(start_timeout_s=config.fleet.start_timeout_s)
        self._state = FleetState(roles(config.fleet), self._policy)
        self._launches: dict[str, _Launch] = {}
        self._fatal: PhasorError | None = None
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._stopped = asyncio.Event()
        self._cleanups: set[asyncio.Task[None]] = set()
        # Ray runs the constructor of an actor with async methods on the actor's event loop.
        self._loop_task = asyncio.get_running_loop().create_task(self._run())

    async def members(self) -> list[Member]:
        """Return every slot with role, address, incarnation and state."""
        return self._state.members()

    async def fatal_error(self) -> PhasorError | None:
        """Return why a worker can never start, or None."""
        return self._fatal

    async def config(self) -> ServingConfig:
        """Return the configuration that this fleet runs."""
        return self._config

    async def shutdown(self) -> None:
        """Stop every worker in good order and start none again. Idempotent; returns when all are gone."""
        self._events.put_nowait(Shutdown(at_s=time.monotonic()))
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S + CALL_TIMEOUT_S):
                await self._stopped.wait()
                if self._cleanups:
                    await asyncio.wait(self._cleanups)
        except TimeoutError:
            _log.warning("workers did not stop in time; killing them")
            for launch in self._launches.values():
                await self._discard(launch)

    # ---- the loop: event in, instructions out, carried out in tasks of their own

    async def _run(self) -> None:
        try:
            await in_thread(
                _remove_stale_groups, timeout_s=CALL_TIMEOUT_S, what="removing old placement groups"
            )
        except Exception:
            _log.exception("could not look for placement groups of an earlier fleet")
        event: Event = Tick(at_s=time.monotonic())
        while True:
            try:
                for instruction in self._state.handle(event):
                    self._execute(instruction)
            except Exception:
                _log.exception("bug in the fleet while handling %r", event)
            if self._state.stopped:
                self._stopped.set()
            event = await self._next_event()

    async def _next_event(self) -> Event:
        due_s = self._state.next_deadline_s()
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                return await self._events.get()
        except TimeoutError:
            return Tick(at_s=time.monotonic())

    def _execute(self, instruction: Instruction) -> None:
        _log.info("%s", instruction)
        if isinstance(instruction, StartWorker):
            launch = _Launch(instruction.slot, instruction.launch)
            self._launches[instruction.slot] = launch
            launch.task = asyncio.create_task(self._live(launch, instruction.role))
        elif isinstance(instruction, KillWorker):
            self._spawn(self._kill(self._launches[instruction.slot]))
        else:
            self._spawn(self._stop(self._launches[instruction.slot], instruction))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)

    async def _live(self, launch: _Launch, role: Role) -> None:
        """Take one worker through its whole life: place, start, watch."""
        slot, number = launch.slot, launch.launch
        try:
            await self._place(launch, role)
            address, incarnation = await call(
                launch.actor.start.remote(),
                timeout_s=self._policy.start_timeout_s,
                what=f"starting {launch.slot}",
            )
        except Exception as exc:
            fatal = isinstance(exc, ConfigError)
            if isinstance(exc, ConfigError):
                self._fatal = exc
            _log.warning("%s did not start: %s", launch.slot, exc)
            self._put(
                StartFailed(
                    at_s=time.monotonic(), error=first_line(exc), fatal=fatal, slot=slot, launch=number
                )
            )
            return
        self._put(
            WorkerReady(
                at_s=time.monotonic(), address=address, incarnation=incarnation, slot=slot, launch=number
            )
        )
        await self._watch(launch)

    async def _place(self, launch: _Launch, role: Role) -> None:
        placement = worker_placement(self._config.fleet)
        actor_class = self._classes[role]

        def place() -> None:
            import ray
            import ray.util
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            name = f"{launch.slot}.{launch.launch}"
            bundles = [dict(bundle) for bundle in placement.bundles]
            launch.group = ray.util.placement_group(
                bundles, strategy=placement.strategy, name=_GROUP_PREFIX + name
            )
            wait_s = self._policy.start_timeout_s
            if not launch.group.wait(timeout_seconds=wait_s):
                raise WorkerLostError(f"no host has room for {bundles[0]} (waited {wait_s:g} s)")
            launch.actor = (
                ray.remote(actor_class)
                .options(
                    num_cpus=bundles[0].get("CPU", 0),
                    num_gpus=bundles[0].get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        launch.group, placement_group_bundle_index=0
                    ),
                    # Restarting is ours: a new process is a new incarnation, and there is a backoff.
                    max_restarts=0,
                    max_task_retries=0,
                )
                .remote(at_host(self._config, _host_of(launch.group)).worker(role))
            )
            if launch.discarded:
                launch.discard()

        await in_thread(
            place, timeout_s=self._policy.start_timeout_s + CALL_TIMEOUT_S, what=f"placing {launch.slot}"
        )
        if launch.actor is None:
            raise WorkerLostError(f"{launch.slot} was given up while it was placed")

    async def _watch(self, launch: _Launch) -> None:
        import ray.exceptions

        slot, number = launch.slot, launch.launch
        while not launch.discarded:
            try:
                async with asyncio.timeout(_PING_HOLD_S + _PING_TIMEOUT_S):
                    await launch.actor.ping.remote(_PING_HOLD_S)
            except (TimeoutError, ray.exceptions.ActorUnavailableError):
                self._put(PingMissed(at_s=time.monotonic(), slot=slot, launch=number))
            except Exception as exc:
                if not launch.discarded:
                    _log.warning("%s is gone: %s", launch.slot, first_line(exc))
                self._put(WorkerDied(at_s=time.monotonic(), error=first_line(exc), slot=slot, launch=number))
                return
            else:
                self._put(PingAnswered(at_s=time.monotonic(), slot=slot, launch=number))

    def _put(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def _stop(self, launch: _Launch, instruction: StopWorker) -> None:
        try:
            if launch.actor is not None:
                await call(
                    launch.actor.stop.remote(_STOP_GRACE_S),
                    timeout_s=_STOP_TIMEOUT_S,
                    what=f"stopping {launch.slot}",
                )
        except Exception as exc:
            _log.warning("%s did not stop in good order: %s", launch.slot, first_line(exc))
        await self._kill(launch)
        self._put(WorkerStopped(at_s=time.monotonic(), slot=instruction.slot, launch=instruction.launch))

    async def _kill(self, launch: _Launch) -> None:
        launch.discarded = True
        if launch.task is not None:
            launch.task.cancel()
        await self._discard(launch)

    async def _discard(self, launch: _Launch) -> None:
        try:
            await in_thread(launch.discard, timeout_s=CALL_TIMEOUT_S, what=f"ending {launch.slot}")
        except WorkerLostError as exc:
            _log.warning("%s", exc)


def _host_of(group: Any) -> str:
    """Return the address of the host that a placement group's first bundle is on."""
    import ray
    import ray.util

    node_id = ray.util.placement_group_table(group)["bundles_to_node_id"][0]
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)


def _remove_stale_groups() -> None:
    """Give back the places of the fleet before this one: Ray keeps a restarted actor's groups."""
    import ray.util
    from ray.util.placement_group import PlacementGroup

    for group_id, row in ray.util.placement_group_table().items():
        if row["name"].startswith(_GROUP_PREFIX) and row["state"] != "REMOVED":
            ray.util.remove_placement_group(PlacementGroup(_group_id(group_id)))


def _group_id(text: str) -> Any:
    from ray import PlacementGroupID

    return PlacementGroupID(bytes.fromhex(text))
