"""`phasor serve`, `phasor demo` and `phasor fleet`: flags to configuration, and off it goes.

Nothing here decides anything; Ray and torch are imported when a command runs, so `--help` is quick. Errors of
ours leave as they are: `phasor.deploy.cli` makes one line of each.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from phasor.core.config import ServingConfig, build, load_file, parse_bytes
from phasor.core.logs import configure_logging
from phasor.deploy import serve_options as options

_FLAGS: dict[str, str] = {
    "model": "model.path",
    "served_name": "model.served_name",
    "dtype": "model.dtype",
    "device": "model.device",
    "max_model_len": "model.max_model_len",
    "threads": "model.num_threads",
    "block_tokens": "kv.block_tokens",
    "prefill": "fleet.num_prefill",
    "decode": "fleet.num_decode",
    "gpus_per_worker": "fleet.gpus_per_worker",
    "cpus_per_worker": "fleet.cpus_per_worker",
    "ray_address": "fleet.ray_address",
    "start_timeout": "fleet.start_timeout_s",
    "host": "router.host",
    "port": "router.port",
    "metrics_port": "router.metrics_port",
    "log_format": "router.log_format",
    "local_prefill_tokens": "router.local_prefill_tokens",
    "transport": "transport.kind",
    "worker_host": "transport.host",
}
"""Flag (as a Python name) to key of the configuration tree."""


def register(app: typer.Typer) -> None:
    """Add `serve`, `demo` and `fleet` to the `phasor` command."""
    app.command("serve")(_serve)
    app.command("demo")(_demo)
    fleet = typer.Typer(
        no_args_is_help=True, help="Look at, or end, a deployment left behind by `serve --detach`."
    )
    fleet.command("status")(_fleet_status)
    fleet.command("stop")(_fleet_stop)
    app.add_typer(fleet, name="fleet")


def serving_config(file: Path | None, flags: dict[str, Any]) -> ServingConfig:
    """Return the configuration: defaults, then the file, then every flag that was given.

    Args:
        file: a TOML file, or None.
        flags: by Python name; None means not given.

    Raises:
        ConfigError: naming the key, its value and what would work.
    """
    values = (load_file(file) if file is not None else ServingConfig()).model_dump()
    for flag, key in _FLAGS.items():
        if flags.get(flag) is not None:
            section, name = key.split(".")
            values[section][name] = flags[flag]
    if flags.get("kv_memory") is not None:
        values["kv"]["memory_bytes"] = parse_bytes(flags["kv_memory"], field="--kv-memory")
    if flags.get("max_step_tokens") is not None:
        for role in ("prefill", "decode"):
            values[role]["max_step_tokens"] = flags["max_step_tokens"]
    return build(ServingConfig, values)


def _serve(
    model: options.Model = None,
    served_name: options.ServedName = None,
    dtype: options.Dtype = None,
    kv_memory: options.KVMemory = None,
    block_tokens: options.BlockTokens = None,
    max_model_len: options.MaxModelLen = None,
    max_step_tokens: options.MaxStepTokens = None,
    prefill: options.Prefill = None,
    decode: options.Decode = None,
    threads: options.Threads = None,
    device: options.Device = None,
    gpus_per_worker: options.GpusPerWorker = None,
    cpus_per_worker: options.CpusPerWorker = None,
    tensor_parallel: options.TensorParallel = 1,
    local_prefill_tokens: options.LocalPrefillTokens = None,
    transport: options.Transport = None,
    worker_host: options.WorkerHost = None,
    host: options.Host = None,
    port: options.Port = None,
    metrics_port: options.MetricsPort = None,
    log_format: options.LogFormat = None,
    config: options.Config = None,
    ray_address: options.RayAddress = None,
    detach: options.Detach = False,
    replace: options.Replace = False,
    start_timeout: options.StartTimeout = None,
) -> None:
    """Serve a model: one command starts Ray, the workers and the router, and Ctrl-C ends them all.

    Prefill workers read prompts, decode workers write replies, and the KV cache travels between them. Try:

        phasor serve                                  SmolLM2 (135 M) on this machine's CPU

        phasor serve --model ./my-model --kv-memory 2GiB --decode 2

        phasor serve --ray-address auto --detach      on a running Ray cluster (see deploy/README.md)

    Then, in another terminal: phasor chat
    """
    flags = dict(locals())

    async def run() -> None:
        from phasor.deploy.placement import check_fleet
        from phasor.deploy.serve import serve, serve_detached

        tree = serving_config(config, flags)
        check_fleet(tree, num_ranks=tensor_parallel)
        configure_logging(tree.router.log_format)
        if detach:
            await serve_detached(tree, display=_display(), replace=replace)
        else:
            await serve(tree, display=_display())

    asyncio.run(run())


def _demo(
    model: Annotated[
        str, typer.Option(help="A folder, a short name or a Hub id; it needs a chat template.")
    ] = "smollm2",
    kv_memory: Annotated[str, typer.Option(help="KV pool of each worker.")] = "512MiB",
) -> None:
    """Show the whole system once: two questions to a real model, and where every token came from.

    Starts one prefill and one decode worker on a free port, streams two answers of one dialog, prints what was
    computed, reused and transferred, and ends without leaving a process behind.
    """

    async def run() -> None:
        from phasor.deploy.demo import demo

        tree = serving_config(None, {"model": model, "kv_memory": kv_memory, "port": 0})
        await demo(tree, display=_display())

    asyncio.run(run())


_RAY_ADDRESS = typer.Option(help='The cluster: "auto" or host:port.')


def _fleet_status(ray_address: Annotated[str, _RAY_ADDRESS] = "auto") -> None:
    """List the workers of a detached deployment: state, address, incarnation, restarts, last error."""

    async def run() -> None:
        from phasor.deploy.fleet_commands import fleet_status

        await fleet_status(ray_address, console=Console())

    asyncio.run(run())


def _fleet_stop(ray_address: Annotated[str, _RAY_ADDRESS] = "auto") -> None:
    """End a detached deployment: the router first, then the workers. Ray itself stays."""

    async def run() -> None:
        from phasor.deploy.fleet_commands import fleet_stop

        await fleet_stop(ray_address, console=Console())

    asyncio.run(run())


def _display() -> Any:
    from phasor.deploy.display import Display

    return Display(Console(highlight=False))
