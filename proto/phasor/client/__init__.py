"""The Python client: `Client` blocks, `AsyncClient` is for asyncio; both speak `phasor.v1.Inference`. No torch.

    with Client("127.0.0.1:50051") as client:
        for event in client.generate("The capital of France is", max_tokens=8):
            print(event)

Every failure is a `phasor.core.errors.PhasorError`.
"""

from phasor.client.aio import AsyncClient, AsyncReply
from phasor.client.blocking import Client, Reply
from phasor.client.messages import SamplingOptions
from phasor.client.types import (
    Choice,
    Completion,
    Counts,
    Delta,
    Event,
    Finished,
    Message,
    ModelCard,
    Prompt,
    Rope,
    ServerInfo,
    Worker,
)

__all__ = [
    "AsyncClient",
    "AsyncReply",
    "Choice",
    "Client",
    "Completion",
    "Counts",
    "Delta",
    "Event",
    "Finished",
    "Message",
    "ModelCard",
    "Prompt",
    "Reply",
    "Rope",
    "SamplingOptions",
    "ServerInfo",
    "Worker",
]
