"""Two ends of page transfers in one process, with real gRPC between them, and links that fail on demand."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from phasor.core.config import TransportConfig
from phasor.core.identity import Identity
from phasor.core.ids import Incarnation, TicketId, new_incarnation, new_ticket_id
from phasor.transport.link import Link, LinkFactory, Rendezvous
from phasor.transport.receiver import ChunkArrived, PageReceiver, TransferEvent, TransferFailed
from phasor.transport.sender import DEFAULT_LIMITS, LinkLimits, PageChunk, PageSender
from phasor.v1 import worker_pb2 as pb
from phasor.v1 import worker_pb2_grpc
from phasor.wire.channels import new_server

BLOCK_SHAPE = (2, 24)
TIMEOUT_S = 1.0
PATIENCE_S = 20.0
"""For a loaded machine: nothing that is right takes so long, and nothing that hangs is waited for longer."""

SINGLE_RUNS = replace(DEFAULT_LIMITS, min_run_bytes=0)
"""Every run is a message of its own, so that faults can be aimed at each of them."""

IDENTITY = Identity(
    weights_digest="aa" * 32,
    adapter_digest="",
    k_dtype="float32",
    v_dtype="float32",
    layers=(0, 1),
    num_kv_heads=2,
    k_dim=4,
    v_dim=2,
    block_tokens=2,
    retention="full",
    rope_fingerprint="bb" * 32,
    tier=1.0,
    position_basis="absolute",
    numerics_version=1,
    tenant_salt="",
)


async def until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait for a condition that other threads bring about."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never came: {what}"
        await asyncio.sleep(0.002)


@dataclass
class Faults:
    """What goes wrong on links made through FaultyLinks. Read by link threads."""

    flip: bool = False
    """Flip one bit of the next tensor that is sent."""
    stall: threading.Event | None = None
    """Set to an event: sends (or receives, at the decode end) wait for it first."""
    break_after: int | None = None
    """Close the link before the tensor with this number (from 0) is sent."""
    num_sent: int = 0
    links: list[Link] = field(default_factory=list)


class FaultyLink:
    """A link that damages, delays or breaks what passes."""

    def __init__(self, link: Link, faults: Faults) -> None:
        self._link, self._faults = link, faults
        self.can_fence, self.device = link.can_fence, link.device
        faults.links.append(link)

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._stall()
            if self._faults.break_after == self._faults.num_sent:
                self._link.close()
            if self._faults.flip:
                self._faults.flip = False
                tensor = tensor.clone()
                tensor.view(-1).view(torch.uint8)[5] ^= 1
            self._link.send([tensor])
            self._faults.num_sent += 1

    def recv(self, tensors: Sequence[torch.Tensor]) -> None:
        self._stall()
        self._link.recv(tensors)

    def close(self) -> None:
        self._link.close()

    def _stall(self) -> None:
        if self._faults.stall is not None:
            self._faults.stall.wait(PATIENCE_S)


class FaultyLinks:
    """A LinkFactory around another one."""

    def __init__(self, factory: LinkFactory, faults: Faults) -> None:
        self._factory, self._faults = factory, faults
        self.kind = factory.kind

    def host(self, link_id: str) -> Rendezvous:
        at = self._factory.host(link_id)
        return Rendezvous(at.host, at.port, lambda: FaultyLink(at.connect(), self._faults))

    def join(self, link_id: str, host: str, port: int) -> Link:
        return FaultyLink(self._factory.join(link_id, host, port), self._faults)


def transport_config(timeout_s: float = TIMEOUT_S) -> TransportConfig:
    return TransportConfig(kind="gloo", timeout_s=timeout_s)


class DecodeEnd:
    """A PageReceiver behind a gRPC server, and an owner that places pages in a pool of its own.

    Args:
        factory: opens links.
        hold: keep arrived chunks in `held` instead of placing them.
        port: of the server; 0 takes a free one.
    """

    def __init__(
        self,
        factory: LinkFactory,
        *,
        hold: bool = False,
        port: int = 0,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.factory, self.hold, self.dtype = factory, hold, dtype
        self.incarnation = new_incarnation()
        self.identity = options.pop("identity", IDENTITY)
        self.pool = torch.zeros(4096, *BLOCK_SHAPE, dtype=dtype)
        self.blocks: dict[TicketId, int] = {}
        self.held: list[ChunkArrived] = []
        self.failures: dict[TicketId, Exception] = {}
        self.last: dict[TicketId, pb.LastChunk] = {}
        self._port, self._options = port, options
        self._next_block = 1

    async def __aenter__(self) -> "DecodeEnd":
        self._server = new_server()
        self.receiver = PageReceiver(
            incarnation=self.incarnation,
            identity=self.identity,
            block_shape=BLOCK_SHAPE,
            dtype=self.dtype,
            config=self._options.pop("config", transport_config()),
            deliver=self._deliver,
            link_factory=self.factory,
            **self._options,
        )
        worker_pb2_grpc.add_PeerServicer_to_server(self.receiver, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self.address = f"127.0.0.1:{self.port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.receiver.close()
        await self._server.stop(0.0)

    def issue(self, num_blocks: int, *, first_block: int = 0, deadline_s: float = PATIENCE_S) -> pb.Ticket:
        """Open a ticket over fresh blocks of the pool."""
        ticket_id = new_ticket_id()
        self.blocks[ticket_id] = self._next_block - first_block
        self._next_block += num_blocks
        self.receiver.issue(ticket_id, first_block=first_block, num_blocks=num_blocks, deadline_s=deadline_s)
        return pb.Ticket(
            ticket_id=ticket_id,
            decode_address=self.address,
            decode_incarnation=self.incarnation,
            first_block=first_block,
            num_blocks=num_blocks,
            first_head=0,
            num_heads=BLOCK_SHAPE[0],
            deadline_s=deadline_s,
        )

    def pages_of(self, ticket: pb.Ticket) -> torch.Tensor:
        """What lies in a ticket's blocks."""
        start = self.blocks[TicketId(ticket.ticket_id)] + ticket.first_block
        return self.pool[start : start + ticket.num_blocks]

    def place(self, event: ChunkArrived) -> None:
        """Copy a chunk into the pool and say so."""
        if event.pages is not None:
            start = self.blocks[event.ticket_id] + event.first_block
            self.pool[start : start + event.pages.shape[0]] = event.pages
        if event.last is not None:
            self.last[event.ticket_id] = event.last
        event.acknowledge("")

    async def failure(self, ticket: pb.Ticket) -> Exception:
        """Wait until a ticket failed; returns why."""
        ticket_id = TicketId(ticket.ticket_id)
        await until(lambda: ticket_id in self.failures, f"failure of {ticket_id}")
        return self.failures[ticket_id]

    async def chunk(self, index: int = 0) -> ChunkArrived:
        """Wait for a held chunk."""
        await until(lambda: len(self.held) > index, f"chunk {index}")
        return self.held[index]

    def _deliver(self, event: TransferEvent) -> None:
        if isinstance(event, TransferFailed):
            assert event.ticket_id not in self.failures, "a ticket failed twice"
            self.failures[event.ticket_id] = event.error
        elif self.hold:
            self.held.append(event)
        else:
            self.place(event)


class PrefillEnd:
    """A PageSender and pages to send."""

    def __init__(
        self,
        factory: LinkFactory,
        *,
        identity: Identity = IDENTITY,
        limits: LinkLimits = SINGLE_RUNS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.incarnation: Incarnation = new_incarnation()
        self.sender = PageSender(
            incarnation=self.incarnation,
            identity=identity,
            config=transport_config(timeout_s),
            link_factory=factory,
            limits=limits,
        )

    async def __aenter__(self) -> PageSender:
        return self.sender

    async def __aexit__(self, *_: object) -> None:
        await self.sender.close()


def random_pages(num_blocks: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[num_blocks, kv_heads, page_elements]`, different for every seed."""
    return torch.randn(num_blocks, *BLOCK_SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def last_chunk(num_tokens: int = 7) -> pb.LastChunk:
    return pb.LastChunk(first_tokens=[42], num_tokens=num_tokens)


async def send_all(sender: PageSender, ticket: pb.Ticket, pages: torch.Tensor, chunk_blocks: int = 3) -> None:
    """Send a whole ticket in chunks of two runs each, and wait until it is acknowledged."""
    transfer = await sender.open(ticket)
    for start in range(0, pages.shape[0], chunk_blocks):
        part = pages[start : start + chunk_blocks]
        last = last_chunk() if start + chunk_blocks >= pages.shape[0] else None
        transfer.push(PageChunk(ticket.first_block + start, [part[:1], part[1:]], last))
    if pages.shape[0] == 0:
        transfer.push(PageChunk(ticket.first_block, [], last_chunk()))
    await transfer.wait_acknowledged(PATIENCE_S)
    assert transfer.num_bytes == pages.nbytes


async def works(sender: PageSender, decode: DecodeEnd, seed: int = 99) -> None:
    """The proof that whatever happened before left nothing behind: a transfer, byte for byte."""
    decode.hold = False
    ticket, pages = decode.issue(4), random_pages(4, seed, decode.dtype)
    await send_all(sender, ticket, pages)
    assert torch.equal(decode.pages_of(ticket), pages)
    await at_rest(decode)


async def at_rest(decode: DecodeEnd) -> None:
    """No ticket is open and no byte is staged."""
    receiver = decode.receiver
    await until(lambda: receiver.num_open_tickets == 0, "tickets closed")
    await until(lambda: receiver.staging_bytes == 0, "staging given back")


def link_threads() -> list[str]:
    """Names of the link threads that run in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("phasor-")]


def changed(identity: Identity, name: str) -> Identity:
    """An identity that differs in one field."""
    value = getattr(identity, name)
    if isinstance(value, str):
        other: Any = value + "x"
    elif isinstance(value, tuple):
        other = (*value, 99)
    else:
        other = value + 1
    return replace(identity, **{name: other})


class RawPeer:
    """A prefill end that says what it likes: for what our own sender never does."""

    def __init__(self, decode: DecodeEnd, factory: LinkFactory, incarnation: str = "inc-raw") -> None:
        self._decode, self._factory, self._incarnation = decode, factory, incarnation

    async def __aenter__(self) -> "RawPeer":
        from phasor.wire.channels import connect

        self._channel = connect(self._decode.address)
        self.stub = worker_pb2_grpc.PeerStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def offer(self, link_id: str = "link-raw", **fields: Any) -> Link:
        """Open a link by hand."""
        from phasor.wire.convert import identity_to_pb

        at = await asyncio.to_thread(self._factory.host, link_id)
        offer = pb.LinkOffer(
            link_id=link_id,
            prefill_incarnation=self._incarnation,
            decode_incarnation=self._decode.incarnation,
            identity=identity_to_pb(IDENTITY),
            transport=self._factory.kind,
            store_host=at.host,
            store_port=at.port,
        )
        offer.MergeFrom(pb.LinkOffer(**fields))
        await self.stub.OpenLink(offer, timeout=PATIENCE_S)
        return await asyncio.to_thread(at.connect)

    def stream(self) -> Any:
        """A stream to write announcements to and read answers from."""
        return self.stub.Transfer(timeout=PATIENCE_S)
