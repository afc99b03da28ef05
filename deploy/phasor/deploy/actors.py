"""The named, detached actors of a deployment (Fleet, Router): made, found and ended here.

`phasor serve` keeps the router in its own process; `phasor serve --detach` leaves it behind as `RouterActor`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phasor.core.config import RouterConfig, ServingConfig
from phasor.core.errors import ConfigError, WorkerLostError
from phasor.core.logs import configure_logging
from phasor.deploy.fleet import FLEET_NAME, Fleet
from phasor.deploy.fleet_state import FleetPolicy, Member, MemberState, Role
from phasor.deploy.ray_calls import CALL_TIMEOUT_S, call, in_thread
from phasor.deploy.ray_local import NAMESPACE

if TYPE_CHECKING:
    from phasor.router.registry import Member as RouterMember

ROUTER_NAME = "Router"
"""The router actor's name in Ray's namespace "phasor"."""

POLL_S = 1.0
"""How often a router asks the fleet who there is."""

_MEMBERS_TIMEOUT_S = 5.0
# Ray gives its head 1.0 of this, whichever host that is: a place that survives a new head, unlike a node id.
_ON_THE_HEAD = {"node:__internal_head__": 0.001}
_FLEET_SHUTDOWN_S = 45.0

_log = logging.getLogger(__name__)


def router_members(members: Sequence[Member]) -> "list[RouterMember]":
    """Return the ready workers in the router's words."""
    from phasor.router.registry import Member as RouterMember

    return [RouterMember(role=m.role, address=m.address) for m in members if m.state is MemberState.READY]


async def follow_fleet(
    fleet: Any,
    set_members: "Callable[[list[RouterMember]], None]",
    *,
    on_change: Callable[[list[Member]], None] = lambda _: None,
    poll_s: float = POLL_S,
) -> None:
    """Tell a router every `poll_s` seconds which workers there are, until cancelled.

    While the fleet does not answer, the router keeps what it knows: its own health checks go on.

    Args:
        fleet: the Fleet's actor handle.
        set_members: `RouterServer.set_members`.
        on_change: called with all members when one of them is in another state than before.
        poll_s: seconds between two questions.
    """
    silent, known = False, None
    while True:
        try:
            members = await call(
                fleet.members.remote(), timeout_s=_MEMBERS_TIMEOUT_S, what="asking the fleet"
            )
            set_members(router_members(members))
            states = [(member.launch, member.state) for member in members]
            if known is not None and states != known:
                on_change(members)
            known = states
            silent = False
        except WorkerLostError as exc:
            if not silent:
                _log.warning("the fleet does not answer: %s", exc)
            silent = True
        await asyncio.sleep(poll_s)


class RouterActor:
    """A router that stays when the process that made it ends. Requests reach it over gRPC, not through Ray.

    Ray calls `__init__` again when its process died; it then binds the same port and asks the fleet anew.

    Args:
        config: host and port to bind, and limits.
    """

    def __init__(self, config: RouterConfig) -> None:
        configure_logging(config.log_format)
        from phasor.router.server import RouterServer

        self._server = RouterServer(config)
        self._starting = asyncio.get_running_loop().create_task(self._server.start())
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def address(self) -> str:
        """Return host:port once it is bound; this host's own address if it is bound to all of them.

        Raises:
            ConfigError: the port is taken.
        """
        host, _, port = (await asyncio.shield(self._starting)).rpartition(":")
        if host == "0.0.0.0":
            import ray.util

            host = ray.util.get_node_ip_address()
        return f"{host}:{port}"

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, let running ones end for up to `grace_s` seconds. Idempotent."""
        self._following.cancel()
        await self._server.stop(grace_s)

    async def _follow(self) -> None:
        await asyncio.shield(self._starting)
        fleet = await find_actor(FLEET_NAME)
        while fleet is None:  # made a moment after us
            await asyncio.sleep(POLL_S)
            fleet = await find_actor(FLEET_NAME)
        await follow_fleet(fleet, self._server.set_members)


async def find_actor(name: str) -> Any | None:
    """Return the handle of a named actor of ours, or None. The process is connected to Ray."""
    import ray

    def look() -> Any | None:
        with contextlib.suppress(ValueError):
            return ray.get_actor(name, namespace=NAMESPACE)
        return None

    return await in_thread(look, timeout_s=CALL_TIMEOUT_S, what=f"looking for the actor {name}")


async def start_fleet(
    config: ServingConfig,
    *,
    policy: FleetPolicy | None = None,
    classes: Mapping[Role, type] | None = None,
) -> Any:
    """Make the Fleet actor and return its handle; workers start at once.

    Args:
        config: the whole tree; `model.path` is a folder on every host.
        policy: see `Fleet`.
        classes: see `Fleet`.

    Raises:
        ConfigError: this cluster has a fleet already.
    """
    if await find_actor(FLEET_NAME) is not None:
        raise ConfigError(
            "fleet.ray_address",
            config.fleet.ray_address,
            "this cluster runs a fleet already: see `phasor fleet status`, end it with `phasor fleet stop`",
        )
    return await _make(Fleet, FLEET_NAME, config, policy, classes)


async def start_router(config: RouterConfig) -> Any:
    """Make the Router actor, on the head host so that clients know where it is; return its handle."""
    return await _make(RouterActor, ROUTER_NAME, config)


async def _make(cls: type, name: str, *args: Any) -> Any:
    import ray

    def make() -> Any:
        actor = ray.remote(cls).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            # For ever: a supervisor that gives up leaves workers that nobody restarts.
            max_restarts=-1,
            resources=_ON_THE_HEAD,
        )
        return actor.remote(*args)

    return await in_thread(make, timeout_s=CALL_TIMEOUT_S, what=f"making the actor {name}")


async def stop_fleet(fleet: Any) -> None:
    """Stop every worker in good order, then the fleet itself. Never raises: it may be gone already."""
    try:
        await call(fleet.shutdown.remote(), timeout_s=_FLEET_SHUTDOWN_S, what="stopping the fleet")
    except WorkerLostError as exc:
        _log.warning("%s", exc)
    await _kill(fleet, FLEET_NAME)


async def stop_router(router: Any, *, grace_s: float) -> None:
    """Stop the Router actor. Never raises: it may be gone already."""
    try:
        await call(router.stop.remote(grace_s), timeout_s=grace_s + 10.0, what="stopping the router")
    except WorkerLostError as exc:
        _log.warning("%s", exc)
    await _kill(router, ROUTER_NAME)


async def _kill(actor: Any, name: str) -> None:
    import ray

    def kill() -> None:
        with contextlib.suppress(ValueError):
            ray.kill(actor, no_restart=True)

    with contextlib.suppress(WorkerLostError):
        await in_thread(kill, timeout_s=CALL_TIMEOUT_S, what=f"ending the actor {name}")
