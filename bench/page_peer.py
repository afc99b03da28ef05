"""The decode end of `bench_handover.py`, in a process of its own: places pages as a decode worker does.

Prints one JSON line with its address when it is ready. Then it does what each line on standard input says and answers
with one line: `issue N` opens a ticket for N blocks, `raw HOST PORT SIZES...` joins a plain gloo group and receives
messages of these numbers of blocks into one buffer, round after round, as the other end asks: 1 is a round, 2 is a
round where each message is also copied into the pool, 0 is the end. Each round is answered with one number.
"""

import argparse
import asyncio
import json
import queue
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phasor.core.config import TransportConfig
from phasor.core.identity import Identity
from phasor.core.ids import BlockId, new_incarnation, new_ticket_id
from phasor.engine.kv import PagedKV
from phasor.engine.pages import PageLayout
from phasor.transport.receiver import ChunkArrived, PageReceiver, TransferEvent
from phasor.v1 import worker_pb2_grpc
from phasor.wire.channels import new_server

TIMEOUT_S = 60.0
ROUND, ROUND_WITH_COPY = 1, 2


def layout_of(num_layers: int) -> PageLayout:
    """Return pages like SmolLM2's (30 layers), or smaller ones."""
    return PageLayout(
        num_layers=num_layers, num_kv_heads=3, k_dim=64, v_dim=64, block_tokens=16, dtype="bfloat16"
    )


def identity_of(layout: PageLayout) -> Identity:
    """Return what both ends say that they are."""
    return Identity(
        weights_digest="bench",
        adapter_digest="",
        k_dtype=layout.dtype,
        v_dtype=layout.dtype,
        layers=tuple(range(layout.num_layers)),
        num_kv_heads=layout.num_kv_heads,
        k_dim=layout.k_dim,
        v_dim=layout.v_dim,
        block_tokens=layout.block_tokens,
        retention="full",
        rope_fingerprint="bench",
        tier=1.0,
        position_basis="absolute",
        numerics_version=1,
        tenant_salt="",
    )


def raw_group(host: str, port: int, rank: int) -> Any:
    """Join a two-rank gloo group the way torch's documentation does."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    return dist.group.WORLD


class PageOwner:
    """A pool, and the copy into it that a decode worker makes in its engine thread before it acknowledges."""

    def __init__(self, layout: PageLayout, num_blocks: int) -> None:
        self.kv = PagedKV(layout, num_blocks, device="cpu")
        self._arrived: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self.take = self._arrived.put
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def _run(self) -> None:
        while True:
            event = self._arrived.get()
            if isinstance(event, ChunkArrived):
                self._place(event)
            else:
                sys.stderr.write(f"{event.error}\n")

    def _place(self, event: ChunkArrived) -> None:
        if event.pages is not None:
            # The pool is as large as the largest ticket: every ticket fills it from block 1.
            first = 1 + event.first_block
            self.kv.place([BlockId(first + n) for n in range(event.pages.shape[0])], event.pages)
        event.acknowledge("")


def receive_raw(owner: PageOwner, host: str, port: int, sizes: list[int]) -> None:
    """Take the same bytes as plain gloo messages, until the other end leaves."""
    raw_group(host, port, rank=1)
    pool = owner.kv.pool[1 : 1 + sum(sizes)]
    # Not one buffer for all messages: the plain way has every page where it stays.
    buffers, places = torch.split(torch.zeros_like(pool), sizes), torch.split(pool, sizes)
    go, done = torch.zeros(1), torch.zeros(1)
    while True:
        dist.recv(go, 0)
        if not go.item():
            break
        for buffer, place in zip(buffers, places, strict=True):
            dist.recv(buffer, 0)
            if go.item() == ROUND_WITH_COPY:
                place.copy_(buffer)
        dist.send(done, 0)
    dist.destroy_process_group()


async def serve(num_layers: int, num_blocks: int) -> None:
    layout, incarnation = layout_of(num_layers), new_incarnation()
    owner = PageOwner(layout, num_blocks + 1)
    server = new_server()
    receiver = PageReceiver(
        incarnation=incarnation,
        identity=identity_of(layout),
        block_shape=(layout.num_kv_heads, layout.page_elements),
        dtype=torch.bfloat16,
        config=TransportConfig(kind="gloo", timeout_s=TIMEOUT_S),
        deliver=owner.take,
    )
    worker_pb2_grpc.add_PeerServicer_to_server(receiver, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    answer(address=address, incarnation=incarnation)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *rest = line.split()
        if command == "issue":
            ticket_id = new_ticket_id()
            receiver.issue(ticket_id, first_block=0, num_blocks=int(rest[0]), deadline_s=TIMEOUT_S)
            answer(ticket_id=ticket_id)
        else:
            sizes = [int(n) for n in rest[2:]]
            answer(joining=rest[1])
            await asyncio.to_thread(receive_raw, owner, rest[0], int(rest[1]), sizes)
    await receiver.close()
    await server.stop(0.0)


def answer(**fields: str) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(serve(given.layers, given.blocks))


if __name__ == "__main__":
    main()
