"""Options that several commands share, each explained once."""

from typing import Annotated

import typer

from phasor.core.config import RouterConfig

DEFAULT_ADDRESS = f"{RouterConfig().host}:{RouterConfig().port}"
"""Where `phasor serve` listens unless told otherwise. Not imported from the client, which would load gRPC."""
CLI_MAX_TOKENS = 512
"""What people at a terminal wait for; programs that leave max_tokens out get as many as fit."""

Address = Annotated[
    str, typer.Option("--address", "-a", envvar="PHASOR_ADDRESS", help="host:port of the server.")
]
Model = Annotated[str, typer.Option("--model", "-m", help="Served name; empty means what is served.")]
Temperature = Annotated[
    float,
    typer.Option("--temperature", "-t", help="0 takes the likeliest token each time; 1 samples as trained."),
]
TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[
    float | None, typer.Option(help="Sample among the likeliest tokens that together reach this probability.")
]
MinP = Annotated[
    float | None, typer.Option(help="Drop tokens less likely than this share of the likeliest one.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Taken off tokens that the reply contains; -2 to 2.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Taken off tokens as often as the reply contains them; -2 to 2.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: tokens of prompt and reply become less likely.")
]
MinTokens = Annotated[int | None, typer.Option(help="Nothing ends the reply before it has so many tokens.")]
NumReplies = Annotated[int, typer.Option("-n", "--n", help="Replies to the one prompt, one after the other.")]
BestOf = Annotated[int | None, typer.Option(help="Make so many replies, show the n likeliest.")]
Echo = Annotated[bool, typer.Option("--echo", help="Write the prompt before each continuation.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same reply.")]
MaxTokens = Annotated[int, typer.Option(help="At most this many new tokens.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="End the reply before this text. May be given several times.")
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Give up a reply after this long.")]

__all__ = [
    "CLI_MAX_TOKENS",
    "DEFAULT_ADDRESS",
    "Address",
    "BestOf",
    "Echo",
    "FrequencyPenalty",
    "MaxTokens",
    "MinP",
    "MinTokens",
    "Model",
    "NumReplies",
    "PresencePenalty",
    "RepetitionPenalty",
    "Seed",
    "Stop",
    "Temperature",
    "Timeout",
    "TopK",
    "TopP",
]
