"""`phasor demo`: the whole system once, on a real model, with the books open at the end.

One prefill and one decode worker under a private Ray, a router, and a client that asks two questions of one
dialog. The second shares all of the first's text, so its prefix is reused instead of computed.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence

import psutil

from phasor.client import AsyncClient, Delta, Finished, Message
from phasor.core.config import ServingConfig
from phasor.core.errors import InternalError
from phasor.deploy.demo_report import Answer, requests_table, workers_table
from phasor.deploy.display import Display
from phasor.deploy.serve import LocalStack, deployment, until_signal, wait_visible
from phasor.v1.inference_pb2 import WorkerSummary

_SYSTEM = "You are a helpful assistant."
_QUESTIONS = ("What is the capital of France?", "What is it famous for?")
_MAX_TOKENS = 64
_TIMEOUT_S = 120.0
_SETTLE_S = 5.0


async def demo(config: ServingConfig, *, display: Display) -> None:
    """Bring everything up, ask, show where every token came from, and end without leaving a process behind.

    Raises:
        ConfigError: something can never work like this (model, memory).
        WorkerLostError: not ready in time.
        InternalError: a process outlived its stop; the message names it.
    """
    stack = LocalStack()
    ours = {process.pid for process in psutil.Process().children(recursive=True)}

    async def run() -> None:
        async with deployment(config, display=display, stack=stack) as running:
            answers = await _dialog(running.address, display)
            workers = await _settled_workers(running.address, answers)
            display.console.print()
            display.console.print(workers_table(workers))
            display.console.print(requests_table(answers))

    await until_signal(run(), force=stack.kill, display=display)
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in ours]
    if left or stack.left_behind:
        names = [f"{process.pid} {process.name()}" for process in left] + [
            str(pid) for pid in stack.left_behind
        ]
        raise InternalError(f"processes outlived their stop: {', '.join(names)}")
    display.say("All stopped; no process left behind.")


async def _settled_workers(address: str, answers: Sequence[Answer]) -> Sequence[WorkerSummary]:
    """Return the workers once their counts hold all answers: the router asks for them once a second."""
    num_prompt = sum(answer.usage.prompt_tokens for answer in answers)
    num_reply = sum(answer.usage.completion_tokens for answer in answers)
    workers: Sequence[WorkerSummary] = ()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SETTLE_S):
            while True:
                workers = (await wait_visible(address, num_workers=1)).workers
                counts = [worker.counts for worker in workers]
                num_read = sum(c.prompt_tokens_computed_total + c.prompt_tokens_reused_total for c in counts)
                num_made = sum(c.tokens_generated_total for c in counts)
                if num_read >= num_prompt and num_made >= num_reply - len(answers):
                    break
                await asyncio.sleep(0.2)
    return workers


async def _dialog(address: str, display: Display) -> list[Answer]:
    messages = [Message("system", _SYSTEM)]
    answers: list[Answer] = []
    async with AsyncClient(address) as client:
        for question in _QUESTIONS:
            messages.append(Message("user", question))
            display.console.print(f"\n[bold]{question}[/bold]")
            answer = await _ask(client, messages, question, display)
            messages.append(Message("assistant", answer.text))
            answers.append(answer)
    return answers


async def _ask(client: AsyncClient, messages: Sequence[Message], question: str, display: Display) -> Answer:
    """Stream one answer to the console as it comes."""
    began_s, first_s, text, finished = time.monotonic(), None, "", None
    async for event in client.chat(messages, temperature=0.0, max_tokens=_MAX_TOKENS, timeout_s=_TIMEOUT_S):
        if isinstance(event, Delta):
            if event.text and first_s is None:
                first_s = time.monotonic()
            text += event.text
            display.console.print(event.text, end="", markup=False, highlight=False, soft_wrap=True)
        elif isinstance(event, Finished):
            finished = event
    display.console.print()
    assert finished is not None, "a stream that ends without an error ends with Finished"
    ended_s = time.monotonic()
    return Answer(
        question=question,
        text=text,
        usage=finished.usage,
        timing=finished.timing,
        first_token_s=(first_s or ended_s) - began_s,
        total_s=ended_s - began_s,
    )
