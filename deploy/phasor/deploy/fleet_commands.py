"""`phasor fleet`: look at, and end, a deployment that `phasor serve --detach` left in a cluster."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rich.console import Console
from rich.table import Table

from phasor.core.errors import ConfigError
from phasor.deploy.actors import ROUTER_NAME, find_actor, stop_fleet, stop_router
from phasor.deploy.fleet import FLEET_NAME
from phasor.deploy.fleet_state import Member
from phasor.deploy.ray_calls import CALL_TIMEOUT_S, call
from phasor.deploy.ray_local import connect, disconnect

_GRACE_S = 2.0


async def fleet_status(ray_address: str, *, console: Console) -> None:
    """Print the router's address and one row per worker.

    Raises:
        ConfigError: no such cluster, or nothing of ours runs there.
    """
    async with _cluster(ray_address):
        fleet, router = await find_actor(FLEET_NAME), await find_actor(ROUTER_NAME)
        if fleet is None:
            raise ConfigError(
                "ray_address", ray_address, "no fleet runs there; start one with phasor serve --detach"
            )
        members = await call(fleet.members.remote(), timeout_s=CALL_TIMEOUT_S, what="asking the fleet")
        if router is not None:
            address = await call(router.address.remote(), timeout_s=CALL_TIMEOUT_S, what="asking the router")
            console.print(f"router at {address}", highlight=False)
        console.print(members_table(members))


async def fleet_stop(ray_address: str, *, console: Console) -> None:
    """Stop the router, then the workers; return when all are gone.

    Raises:
        ConfigError: no such cluster, or nothing of ours runs there.
    """
    async with _cluster(ray_address):
        fleet, router = await find_actor(FLEET_NAME), await find_actor(ROUTER_NAME)
        if fleet is None and router is None:
            raise ConfigError("ray_address", ray_address, "nothing of Phasor runs there")
        if router is not None:
            await stop_router(router, grace_s=_GRACE_S)
        if fleet is not None:
            await stop_fleet(fleet)
        console.print("Stopped.")


def members_table(members: Sequence[Member]) -> Table:
    """Return one row per slot of the fleet."""
    table = Table("worker", "state", "address", "incarnation", "restarts", "last error")
    for member in members:
        restarts = str(member.num_restarts)
        table.add_row(
            member.slot, member.state, member.address, member.incarnation or "", restarts, member.last_error
        )
    return table


@asynccontextmanager
async def _cluster(ray_address: str) -> AsyncIterator[None]:
    await connect(ray_address, environment={})
    try:
        yield
    finally:
        await disconnect()
