"""`phasor chat` and `phasor generate`: a terminal in front of `phasor.client`.

Through asyncio, because of Ctrl-C: asyncio turns it into a cancelled task, while a KeyboardInterrupt in the middle of a
blocking read can leave gRPC's own locks held, and the next turn of a conversation would wait for them for ever.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from phasor.core.errors import PhasorError
from phasor.deploy import cli_options as options

if TYPE_CHECKING:
    from rich.console import Console

    from phasor.client import AsyncClient, AsyncReply, Message, SamplingOptions

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
    from phasor.client import Message

    sampling: SamplingOptions = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "max_tokens": max_tokens,
        "stop": stop,
    }
    messages = [Message("system", system)] if system is not None else []
    if message is None and sys.stdin.isatty():
        _converse(address, timeout, messages, model, sampling)
        return
    messages.append(Message("user", sys.stdin.read() if message is None else message))
    asyncio.run(_once(address, timeout, lambda client: client.chat(messages, model=model, **sampling)))


def _generate(
    prompt: Annotated[str, typer.Argument(help='The text to continue; "-" reads standard input.')],
    address: options.Address = options.DEFAULT_ADDRESS,
    model: options.Model = "",
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = options.CLI_MAX_TOKENS,
    min_tokens: options.MinTokens = None,
    stop: options.Stop = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")
    ] = False,
    n: options.NumReplies = 1,
    best_of: options.BestOf = None,
    echo: options.Echo = False,
    timeout: options.Timeout = _TIMEOUT_S,
) -> None:
    """Continue a text as it stands, without a chat template.

    Only the continuation goes to standard output. Try:

        phasor generate "The capital of France is" --max-tokens 8

        phasor generate "def fibonacci(n):" --stop "def "

        phasor generate - -t 0.8 < story.txt

        phasor generate "Once" -t 1 --min-p 0.05 -n 3
    """
    sampling: SamplingOptions = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "stop": stop,
        "ignore_eos": ignore_eos,
        "n": n,
        "best_of": best_of,
        "echo": echo,
    }
    _continue(address, timeout, prompt, model, sampling)


def _continue(address: str, timeout_s: float, prompt: str, model: str, sampling: "SamplingOptions") -> None:
    text = sys.stdin.read() if prompt == "-" else prompt
    asyncio.run(_once(address, timeout_s, lambda client: client.generate(text, model=model, **sampling)))


async def _once(address: str, timeout_s: float, ask: "Callable[[AsyncClient], AsyncReply]") -> None:
    """Stream one reply and what it cost."""
    from phasor.client import AsyncClient
    from phasor.deploy.cli_output import print_usage, stderr_console, stream

    async with AsyncClient(address, timeout_s=timeout_s) as client, ask(client) as reply:
        print_usage(stderr_console(), await stream(reply))


def _converse(
    address: str, timeout_s: float, messages: "list[Message]", model: str, sampling: "SamplingOptions"
) -> None:
    """Hold a conversation until end of input. A turn that fails is taken back, and the conversation goes on."""
    import readline  # noqa: F401  (its import gives `input` line editing and history)

    from phasor.client import AsyncClient, Message
    from phasor.deploy.cli_output import stderr_console

    async def connect() -> AsyncClient:
        return AsyncClient(address, timeout_s=timeout_s)

    console = stderr_console()
    with asyncio.Runner() as runner:
        client = runner.run(connect())
        try:
            info = runner.run(client.server_info())
            console.print(
                f"{info.model.name} at {address}, up to {info.model.max_model_len} tokens. "
                "Ctrl-C stops an answer, Ctrl-D ends the conversation.",
                style="dim",
                markup=False,
            )
            while (text := _read_line()) is not None:
                if text.strip():
                    messages.append(Message("user", text))
                    answer = _turn(runner, client, messages, model, sampling, console)
                    # A conversation alternates: without an answer there was no question.
                    messages[-1:] = [messages[-1], Message("assistant", answer)] if answer else []
        finally:
            runner.run(client.close())


def _read_line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        sys.stdout.write("\n")
        return None


def _turn(
    runner: asyncio.Runner,
    client: "AsyncClient",
    messages: "list[Message]",
    model: str,
    sampling: "SamplingOptions",
    console: "Console",
) -> str:
    """Stream one answer; return it, as much as there was when the user stopped it, or nothing if it failed."""
    from phasor.deploy.cli_output import print_usage, stream

    replies: list[AsyncReply] = []

    async def ask() -> None:
        async with client.chat(messages, model=model, **sampling) as reply:
            replies.append(reply)
            print_usage(console, await stream(reply))

    try:
        runner.run(ask())
    except KeyboardInterrupt:
        console.print("stopped", style="dim")
    except PhasorError as exc:
        console.print(f"phasor: error: {exc}", style="red", markup=False, soft_wrap=True)
        return ""
    return replies[0].text if replies else ""
