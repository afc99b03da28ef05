"""`phasor chat` and `phasor generate`: a terminal in front of `phasor.client`."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from phasor.core.errors import PhasorError
from phasor.deploy import cli_options as options

if TYPE_CHECKING:
    from rich.console import Console

    from phasor.client import Client, Message, SamplingOptions

_TIMEOUT_S = 300.0


def register(app: typer.Typer) -> None:
    """Add `chat` and `generate` to the `phasor` command."""
    app.command("chat")(_chat)
    app.command("generate")(_generate)


def _chat(
    message: Annotated[
        str | None, typer.Argument(help="What to say. Left out: a conversation, or standard input if piped.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="A system message before the first one.")
    ] = None,
    address: options.Address = options.DEFAULT_ADDRESS,
    model: options.Model = "",
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = options.CLI_MAX_TOKENS,
    stop: options.Stop = None,
    timeout: options.Timeout = _TIMEOUT_S,
) -> None:
    """Talk to the served model, laid out by its own chat template.

    The answer goes to standard output as it is written, what it cost to standard error. Try:

        phasor chat                             a conversation

        phasor chat "What is a phasor?"         one question, one answer

        git diff | phasor chat -s "Explain."    the message from a pipe

        phasor chat -t 0.7 --seed 1 "A joke!"   sampled, the same each time

    In a conversation Ctrl-C stops an answer, and Ctrl-D ends it all.
    """
    from phasor.client import Client, Message
    from phasor.deploy.cli_output import print_usage, stderr_console, stream

    sampling: SamplingOptions = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "max_tokens": max_tokens,
        "stop": stop,
    }
    messages = [Message("system", system)] if system is not None else []
    console = stderr_console()
    with Client(address, timeout_s=timeout) as client:
        if message is None and sys.stdin.isatty():
            _converse(client, messages, model, sampling, console)
            return
        messages.append(Message("user", sys.stdin.read() if message is None else message))
        with client.chat(messages, model=model, **sampling) as reply:
            print_usage(console, stream(reply))


def _generate(
    prompt: Annotated[str, typer.Argument(help='The text to continue; "-" reads standard input.')],
    address: options.Address = options.DEFAULT_ADDRESS,
    model: options.Model = "",
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = options.CLI_MAX_TOKENS,
    stop: options.Stop = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")
    ] = False,
    timeout: options.Timeout = _TIMEOUT_S,
) -> None:
    """Continue a text as it stands, without a chat template.

    Only the continuation goes to standard output. Try:

        phasor generate "The capital of France is" --max-tokens 8

        phasor generate "def fibonacci(n):" --stop "def "

        phasor generate - -t 0.8 < story.txt
    """
    from phasor.client import Client
    from phasor.deploy.cli_output import print_usage, stderr_console, stream

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling: SamplingOptions = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "max_tokens": max_tokens,
        "stop": stop,
        "ignore_eos": ignore_eos,
    }
    with (
        Client(address, timeout_s=timeout) as client,
        client.generate(text, model=model, **sampling) as reply,
    ):
        print_usage(stderr_console(), stream(reply))


def _converse(
    client: "Client", messages: "list[Message]", model: str, sampling: "SamplingOptions", console: "Console"
) -> None:
    """Hold a conversation until end of input. A turn that fails is taken back, and the conversation goes on."""
    import readline  # noqa: F401  (its import gives `input` line editing and history)

    from phasor.client import Message

    info = client.server_info()
    console.print(
        f"{info.model.name} at {client.address}, up to {info.model.max_model_len} tokens. "
        "Ctrl-C stops an answer, Ctrl-D ends the conversation.",
        style="dim",
        markup=False,
    )
    while True:
        try:
            text = input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return
        if not text.strip():
            continue
        messages.append(Message("user", text))
        try:
            answer = _turn(client, messages, model, sampling, console)
        except PhasorError as exc:
            console.print(f"phasor: error: {exc}", style="red", markup=False, soft_wrap=True)
            answer = ""
        if answer:
            messages.append(Message("assistant", answer))
        else:
            messages.pop()


def _turn(
    client: "Client", messages: "list[Message]", model: str, sampling: "SamplingOptions", console: "Console"
) -> str:
    """Stream one answer; return it, or as much of it as there was when the user stopped it."""
    from phasor.deploy.cli_output import print_usage, stream

    with client.chat(messages, model=model, **sampling) as reply:
        try:
            print_usage(console, stream(reply))
        except KeyboardInterrupt:
            console.print("stopped", style="dim")
        return reply.text
