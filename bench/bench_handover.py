"""The hand-over of a prompt: pages over raw gloo, what of it a user waits for, and a pair beside one combined worker.

`page_transfer`: PageSender to PageReceiver in another process (checksums, staging, the copy into the pool, the
acknowledgement) beside plain `dist.send` and `dist.recv` of the same bytes in messages of the same size, in turns.
`handover_exposed`: from the last chunk's push to its acknowledgement (`Timing.transfer_s`), beside the time to the
first token of the same requests. `first_token`: 1P1D beside one combined worker, in turns, every prompt new.
"""

import asyncio
import json
import random
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import harness
import page_peer
import servers
import torch
import torch.distributed as dist

from phasor.core.config import TransportConfig
from phasor.core.ids import new_incarnation
from phasor.engine.model_source import resolve_model
from phasor.transport.sender import PageChunk, PageSender
from phasor.v1 import worker_pb2

TINY_FOLDER = harness.REPOSITORY / "tests" / "data" / "tiny-code-256"
GOAL_BANDWIDTH, GOAL_EXPOSED, GOAL_FIRST_TOKEN = 0.8, 0.05, 1.1
CHUNK_BLOCKS = 32
"""A prefill worker's step of 512 tokens."""
PROMPTS = {512: 5, 2048: 3, 6000: 2}
"""Tokens, and how often a prompt of so many is asked."""
SMOKE_PROMPTS = {100: 2}
MODEL_LAYERS, MODEL_BLOCKS = 30, 375
MAX_TOKENS = 2


class Pages:
    """The prefill end of page transfers, its peer in another process, and the same bytes over raw gloo."""

    def __init__(self, peer: "subprocess.Popen[str]", address: str, num_layers: int, num_blocks: int) -> None:
        self._peer, self._address = peer, address
        self.layout = page_peer.layout_of(num_layers)
        shape = (num_blocks + 1, self.layout.num_kv_heads, self.layout.page_elements)
        self._pool = torch.randn(shape, dtype=torch.bfloat16)
        self.sizes = [min(CHUNK_BLOCKS, num_blocks - n) for n in range(0, num_blocks, CHUNK_BLOCKS)]
        self.num_blocks = num_blocks

    def _tell(self, line: str) -> dict[str, str]:
        assert self._peer.stdin is not None and self._peer.stdout is not None
        self._peer.stdin.write(line + "\n")
        self._peer.stdin.flush()
        answer: dict[str, str] = json.loads(self._peer.stdout.readline())
        return answer

    def join_raw(self) -> None:
        """Form the plain gloo group."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._tell(f"raw 127.0.0.1 {port} {' '.join(map(str, self.sizes))}")
        page_peer.raw_group("127.0.0.1", port, rank=0)
        self._done = torch.zeros(1)

    def send_raw(self, kind: int) -> None:
        """Send all pages as plain messages and wait for the peer's answer."""
        dist.send(torch.tensor([float(kind)]), 1)
        for pages in torch.split(self._pool[1:], self.sizes):
            dist.send(pages, 1)
        dist.recv(self._done, 1)

    def leave_raw(self) -> None:
        """End the plain group, at both ends."""
        dist.send(torch.zeros(1), 1)
        dist.destroy_process_group()

    def ticket(self, incarnation: str) -> worker_pb2.Ticket:
        """Have the peer open a ticket for all pages."""
        return worker_pb2.Ticket(
            ticket_id=self._tell(f"issue {self.num_blocks}")["ticket_id"],
            decode_address=self._address,
            decode_incarnation=incarnation,
            num_blocks=self.num_blocks,
            num_heads=self.layout.num_kv_heads,
            deadline_s=page_peer.TIMEOUT_S,
        )

    async def send(self, sender: PageSender, ticket: worker_pb2.Ticket, run_blocks: int) -> None:
        """Push all pages in chunks, as runs of `run_blocks` neighbours, and wait until they are placed."""
        transfer = await sender.open(ticket)
        first = 0
        for size in self.sizes:
            chunk = torch.split(self._pool[1 + first : 1 + first + size], run_blocks)
            last = worker_pb2.LastChunk(first_tokens=[1], num_tokens=1)
            is_last = first + size == self.num_blocks
            transfer.push(PageChunk(first, list(chunk), last if is_last else None))
            first += size
        await transfer.wait_acknowledged(page_peer.TIMEOUT_S)


def bench_pages(num_layers: int, num_blocks: int, budget_s: float) -> None:
    with servers.Servers() as started:
        command = ["bench/page_peer.py", "--layers", str(num_layers), "--blocks", str(num_blocks)]
        (ready,) = started.start_ready(command)
        with asyncio.Runner() as runner:
            pages = Pages(started.last_process(), ready["address"], num_layers, num_blocks)
            sender = runner.run(_sender(pages))
            samples = _in_turns(runner, pages, sender, ready["incarnation"], budget_s)
            runner.run(sender.close())
    num_bytes = num_blocks * pages.layout.block_bytes
    baselines = {
        "raw gloo send and recv of the same bytes": (
            harness.spread_of(samples.pop("raw")),
            1 / GOAL_BANDWIDTH,
        ),
        "raw gloo, and one copy out of the receive buffer": (
            harness.spread_of(samples.pop("raw with a copy")),
            None,
        ),
    }
    for (name, taken), (baseline_name, (raw, goal)) in product(samples.items(), baselines.items()):
        spread = harness.spread_of(taken)
        harness.report(
            "page_transfer",
            {
                "transport": "gloo",
                "num_bytes": num_bytes,
                "num_blocks": num_blocks,
                "chunk_blocks": CHUNK_BLOCKS,
                "block_bytes": pages.layout.block_bytes,
                "pool": name,
            },
            spread,
            raw,
            baseline_name=baseline_name,
            goal_ratio=goal,
            unit="ms per transfer",
            scale=1e3,
            more={
                "gb_per_s": round(num_bytes / spread.p50_s / 1e9, 3),
                "baseline_gb_per_s": round(num_bytes / raw.p50_s / 1e9, 3),
            },
        )


async def _sender(pages: Pages) -> PageSender:
    return PageSender(
        incarnation=new_incarnation(),
        identity=page_peer.identity_of(pages.layout),
        config=TransportConfig(kind="gloo", timeout_s=page_peer.TIMEOUT_S),
    )


def _in_turns(
    runner: asyncio.Runner, pages: Pages, sender: PageSender, incarnation: str, budget_s: float
) -> dict[str, list[float]]:
    """Blocks of rounds in turns: the peer reads no commands while it is in a plain group."""
    samples: dict[str, list[float]] = {
        name: [] for name in ("one run per chunk", "single blocks", "raw", "raw with a copy")
    }
    num_turns, num_rounds = (5, 3) if budget_s else (1, 2)

    def ours(run_blocks: int) -> Callable[[], None]:
        ticket = pages.ticket(incarnation)
        return lambda: runner.run(pages.send(sender, ticket, run_blocks))

    for _ in range(num_turns):
        for name, run_blocks in (("one run per chunk", CHUNK_BLOCKS), ("single blocks", 1)):
            ours(run_blocks)()
            samples[name] += [_timed(ours(run_blocks)) for _ in range(num_rounds)]
        pages.join_raw()
        for name, kind in (("raw", page_peer.ROUND), ("raw with a copy", page_peer.ROUND_WITH_COPY)):
            plain = partial(pages.send_raw, kind)
            plain()
            samples[name] += [_timed(plain) for _ in range(num_rounds)]
        pages.leave_raw()
    return samples


def _timed(run: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


class Asked:
    """What a router said of the requests of one size."""

    def __init__(self) -> None:
        self.first_token_s: list[float] = []
        self.transfer_s: list[float] = []
        self.transferred_bytes = 0


def ask(stub: Any, token_ids: Sequence[int], into: Asked) -> None:
    """Ask for a short reply; the first token's time is the client's own."""
    start_s, first_s, finished = time.perf_counter(), 0.0, None
    for response in stub.Generate(servers.generate_request(token_ids, MAX_TOKENS), timeout=servers.CALL_S):
        kind = response.WhichOneof("event")
        if kind == "delta" and not first_s:
            first_s = time.perf_counter() - start_s
        elif kind == "finished":
            finished = response.finished
    assert finished is not None
    into.first_token_s.append(first_s)
    into.transfer_s.append(finished.timing.transfer_s)
    into.transferred_bytes = finished.usage.transferred_bytes


def bench_requests(folder: Path, prompts: dict[int, int], options: Sequence[str]) -> None:
    """Ask a pair and its decode worker alone, behind a router each, in turns."""
    drawn = random.Random(7)
    with servers.Servers() as started:
        decode, prefill = started.start(
            servers.worker_command("decode", str(folder), *options),
            servers.worker_command("prefill", str(folder), *options),
        )
        pair_address, combined_address = started.start(
            servers.router_command(prefill=[prefill], decode=[decode]),
            servers.router_command(decode=[decode]),
        )
        pair, combined = started.inference(pair_address), started.inference(combined_address)
        dtype = servers.describe(started.worker(decode)).dtype
        for num_tokens, num_requests in prompts.items():
            in_pair, alone = Asked(), Asked()
            for number in range(num_requests + 1):
                # The first of each is a warm-up, and may be short.
                warm_up, size = number == 0, min(num_tokens, 512) if number == 0 else num_tokens
                for stub, into in ((pair, in_pair), (combined, alone)):
                    token_ids = [drawn.randrange(3, 250) for _ in range(size)]
                    ask(stub, token_ids, Asked() if warm_up else into)
            config = {
                "model": folder.name,
                "dtype": dtype,
                "prompt_tokens": num_tokens,
                "num_requests": num_requests,
                "transferred_bytes": in_pair.transferred_bytes,
            }
            _report_requests(config, in_pair, alone)


def _report_requests(config: dict[str, Any], in_pair: Asked, alone: Asked) -> None:
    first, transfer = (harness.spread_of(taken) for taken in (in_pair.first_token_s, in_pair.transfer_s))
    common: dict[str, Any] = {"unit": "ms per request", "scale": 1e3}
    harness.report(
        "handover_exposed",
        config,
        transfer,
        first,
        baseline_name="time to the first token",
        goal_ratio=GOAL_EXPOSED,
        **common,
    )
    harness.report(
        "first_token",
        config,
        first,
        harness.spread_of(alone.first_token_s),
        baseline_name="one combined worker",
        goal_ratio=GOAL_FIRST_TOKEN,
        **common,
    )


def main() -> None:
    arguments = harness.arguments(__doc__ or "")
    torch.set_num_threads(1)
    if arguments.smoke:
        bench_pages(2, 5, 0.0)
        bench_requests(TINY_FOLDER, SMOKE_PROMPTS, [])
    else:
        bench_pages(MODEL_LAYERS, MODEL_BLOCKS, arguments.budget_s)
        bench_requests(resolve_model("smollm2"), PROMPTS, ["--kv-memory", "640MiB"])


if __name__ == "__main__":
    main()
