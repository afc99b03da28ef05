"""Which resources each worker needs, as Ray placement groups: one bundle per rank.

Pure: it makes the numbers, `fleet` talks to Ray.
"""

import math
from dataclasses import dataclass

from phasor.core.config import FleetConfig, ServingConfig
from phasor.core.errors import ConfigError
from phasor.deploy.fleet_state import Role

AUTO_HOST = "auto"
"""As `transport.host`: the address by which Ray knows the host that a worker is placed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The placement group of one worker."""

    bundles: tuple[dict[str, float], ...]
    """Resources of each rank, in rank order."""
    strategy: str = "PACK"
    """Ranks of one worker talk at every layer, so Ray keeps them on one host if it can."""


def check_fleet(config: ServingConfig, *, num_ranks: int = 1) -> None:
    """Refuse what the fleet cannot run, before anything starts.

    Raises:
        ConfigError: tensor parallelism, or a device that the workers would not be given.
    """
    if num_ranks != 1:
        raise ConfigError(
            "tensor_parallel",
            num_ranks,
            "a worker has one rank in this version; use 1 and add workers instead",
        )
    if config.model.device == "cuda" and config.fleet.gpus_per_worker == 0:
        raise ConfigError(
            "fleet.gpus_per_worker",
            0,
            "model.device is cuda, so each worker needs a share of a GPU (0.5 lets two share)",
        )


def worker_placement(fleet: FleetConfig, *, num_ranks: int = 1) -> Placement:
    """Return the placement group of one worker of `num_ranks` ranks."""
    bundle: dict[str, float] = {}
    if fleet.cpus_per_worker:
        bundle["CPU"] = fleet.cpus_per_worker
    if fleet.gpus_per_worker:
        bundle["GPU"] = fleet.gpus_per_worker
    # Ray refuses an empty bundle; a sliver of a CPU holds the place of a worker that asks for nothing.
    return Placement(bundles=tuple(dict(bundle or {"CPU": 0.001}) for _ in range(num_ranks)))


def at_host(config: ServingConfig, host: str) -> ServingConfig:
    """Return `config` with the workers' address "auto" replaced by `host`, the one a worker was placed on."""
    if config.transport.host != AUTO_HOST:
        return config
    return config.model_copy(update={"transport": config.transport.model_copy(update={"host": host})})


def check_hosts(config: ServingConfig, *, num_hosts: int) -> None:
    """Refuse workers that could not reach each other.

    Raises:
        ConfigError: several hosts, and workers that listen on the loopback interface.
    """
    host = config.transport.host
    if num_hosts > 1 and (host == "localhost" or host.startswith("127.")):
        raise ConfigError(
            "transport.host",
            host,
            f"the workers of this cluster's {num_hosts} hosts could not reach each other; --worker-host auto "
            "takes each host's own address",
        )


def local_resources(fleet: FleetConfig) -> tuple[int, int]:
    """Return (CPUs, GPUs) that Ray on this machine announces so that the fleet fits.

    The CPUs are logical: Ray only counts with them, so 1P+1D fit on one core.
    """
    num_workers = fleet.num_prefill + fleet.num_decode
    return (
        max(1, math.ceil(num_workers * max(fleet.cpus_per_worker, 0.001))),
        math.ceil(num_workers * fleet.gpus_per_worker),
    )


def roles(fleet: FleetConfig) -> list[Role]:
    """Return the role of every worker to start, decode workers first: nothing works without one."""
    decode: list[Role] = ["decode"] * fleet.num_decode
    prefill: list[Role] = ["prefill"] * fleet.num_prefill
    return decode + prefill
