"""Calls on the wire itself, without `phasor.client`: what tests compare must not depend on our own client."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc


@dataclass
class Reply:
    """Everything one Generate call brought."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_deltas: int = 0
    finished: pb.Finished | None = None

    @property
    def usage(self) -> pb.Usage:
        assert self.finished is not None, "the stream ended without Finished"
        return self.finished.usage


def greedy(max_tokens: int, **sampling: object) -> pb.SamplingParams:
    """Parameters that always take the likeliest token."""
    return pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]


def generate(
    address: str, prompt: str | Sequence[int], sampling: pb.SamplingParams, *, timeout_s: float = 240.0
) -> Reply:
    """Send one prompt (text or token ids) and collect the whole stream; raises grpc.RpcError on any failure."""
    request = pb.GenerateRequest(sampling=sampling, timeout_s=timeout_s)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    reply = Reply()
    with grpc.insecure_channel(address) as channel:
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=timeout_s):
            if response.HasField("finished"):
                reply.finished = response.finished
            else:
                reply.num_deltas += 1
                reply.text += response.delta.text
                reply.token_ids.extend(response.delta.token_ids)
    assert reply.finished is not None, "an OK stream without Finished"
    return reply


def generate_together(
    address: str, prompts: Sequence[Sequence[int]], sampling: pb.SamplingParams, *, timeout_s: float = 400.0
) -> list[Reply]:
    """Send all prompts at once, so that they share batches; replies in order of prompts."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p: generate(address, p, sampling, timeout_s=timeout_s), prompts))
