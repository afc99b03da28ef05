"""The `phasor` command: puts its parts together, and turns every error of ours into one line.

The parts import torch, Ray and gRPC when a command runs, so that `phasor --help` stays quick.
"""

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from phasor.core.errors import PhasorError
from phasor.deploy import cli_chat, cli_info, cli_model, cli_serve

EXIT_ERROR = 2
"""Anything that went wrong and was said in one line on standard error."""
EXIT_INTERRUPTED = 130

# typer does not export the class that its usage errors share.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run the command line of this process (the `phasor` console script)."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: without the program's name.

    Returns:
        the exit status: 0; 2 with one line on standard error; 130 after Ctrl-C.
    """
    try:
        status = build_app()(args=list(arguments), prog_name="phasor", standalone_mode=False)
    except PhasorError as exc:
        return _fail(" ".join(str(exc).split()))
    except _UsageError as exc:
        return _fail_usage(exc)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`| head`). Nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    return status if isinstance(status, int) else 0


def build_app() -> typer.Typer:
    """Return the whole command with all its parts."""
    app = typer.Typer(
        name="phasor",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        callback=_root,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    cli_serve.register(app)
    cli_chat.register(app)
    cli_info.register(app)
    cli_model.register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"phasor {importlib.metadata.version('phasor-serve')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Serve a large language model with prompt readers and reply writers on different machines.

    A first session:

        phasor model fetch smollm2   fetch a real model, 135 M parameters

        phasor serve                 serve it here, until Ctrl-C

        phasor chat                  in another terminal: talk to it

        phasor info                  what is served, and by which workers
    """


def _fail(message: str) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"phasor: error: {message}\n")
    return EXIT_ERROR


def _fail_usage(exc: Exception) -> int:
    message = " ".join(exc.format_message().split())  # type: ignore[attr-defined]
    if type(exc).__name__ == "NoArgsIsHelpError":  # the help is already on the screen
        return EXIT_ERROR
    context = getattr(exc, "ctx", None)
    path = context.command_path if context is not None else "phasor"
    return _fail(f"{message.rstrip('.')} (see `{path} --help`)")
