"""`phasor info`: what a running server says of itself."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from phasor.deploy import cli_options as options

if TYPE_CHECKING:
    from rich.table import Table

    from phasor.client import ServerInfo


def register(app: typer.Typer) -> None:
    """Add `info` to the `phasor` command."""
    app.command("info")(_info)


def _info(
    address: options.Address = options.DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Show what a server serves, its limits and identity, and what each worker holds and has done.

    Try:

        phasor info

        phasor info --json | python -m json.tool
    """
    from rich.console import Console

    from phasor.client import Client

    with Client(address) as client:
        info = client.server_info()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(info)))
        return
    console = Console(highlight=False)
    console.print(server_table(info, address))
    console.print(workers_table(info))


def server_table(info: "ServerInfo", address: str) -> "Table":
    """Return model, limits, rope and KV identity, one per row."""
    from rich.table import Table
    from rich.text import Text

    rope, identity = info.rope, info.identity
    table = Table(title=f"Phasor {info.version} at {address}", show_header=False, title_justify="left")
    rows = {
        "model": f"{info.model.name} ({info.model.dtype}, weights {info.model.weights_digest[:12]})",
        "longest prompt plus reply": f"{info.model.max_model_len} tokens",
        "rope": f"{rope.scheme}, theta {rope.theta:g}, {rope.rotary_dim} dims, "
        f"trained to {rope.trained_positions}, up to {rope.max_positions} ({rope.fingerprint[:12]})",
        "KV block": f"{identity.block_tokens} tokens x {len(identity.layers)} layers x "
        f"{identity.num_kv_heads} heads x ({identity.k_dim} + {identity.v_dim}), "
        f"K {identity.k_dtype}, V {identity.v_dtype}, retention {identity.retention}",
        "metrics of the router": f"http://{info.metrics_address}/metrics" if info.metrics_address else "off",
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def workers_table(info: "ServerInfo") -> "Table":
    """Return what each worker holds now and has done since it started."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Workers, and what they did since they started", title_justify="left", padding=(0, 0))
    for heading in ("worker", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("run/wait", "free blocks", "computed", "reused", "written", "moved"):
        table.add_column(heading, justify="right")
    for worker in info.workers:
        counts = worker.counts
        table.add_row(
            Text(f"{worker.role}\n{worker.address}"),
            "[green]healthy[/green]" if worker.healthy else "[red]lost[/red]",
            f"{counts.num_running}/{counts.num_waiting}",
            f"{counts.num_free_blocks}/{counts.num_blocks}",
            str(counts.prompt_tokens_computed_total),
            str(counts.prompt_tokens_reused_total),
            str(counts.tokens_generated_total),
            f"{counts.bytes_transferred_total / 1e6:.1f} MB",
        )
    return table
