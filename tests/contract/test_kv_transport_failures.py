"""What every kind of link must do for transfers when the other end breaks, falls silent, or talks nonsense."""

import asyncio
import pickle
import random
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from phasor.core.errors import PhasorError, TransferError, TransferTimeoutError, WorkerLostError
from phasor.core.ids import TicketId
from phasor.transport.checksum import checksum
from phasor.transport.gloo import GlooLinks
from phasor.transport.link import LinkFactory
from phasor.transport.sender import PageChunk, PageSender
from phasor.v1 import worker_pb2 as pb
from tests.helpers.transfers import (
    BLOCK_SHAPE,
    PATIENCE_S,
    TIMEOUT_S,
    DecodeEnd,
    Faults,
    FaultyLinks,
    PrefillEnd,
    RawPeer,
    at_rest,
    last_chunk,
    random_pages,
    send_all,
    until,
    works,
)

BLOCK_BYTES = BLOCK_SHAPE[0] * BLOCK_SHAPE[1] * 4


async def test_silent_sender(links: LinkFactory) -> None:
    """It announces and then sends nothing. The link's timeout frees the thread and the staging."""
    faults = Faults(stall=threading.Event())
    async with DecodeEnd(links) as decode, PrefillEnd(FaultyLinks(links, faults)) as sender:
        ticket, bystander = decode.issue(2), decode.issue(2)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [random_pages(2)], last_chunk()))
        assert isinstance(await decode.failure(ticket), TransferTimeoutError)
        with pytest.raises(TransferError):
            await transfer.wait_acknowledged(PATIENCE_S)
        await until(lambda: decode.receiver.staging_bytes == 0, "staging")
        assert decode.receiver.num_open_tickets == 1, "a ticket that had not begun on the link was failed"
        faults.stall.set()
        await send_all(sender, bystander, random_pages(2, 3))
        assert torch.equal(decode.pages_of(bystander), random_pages(2, 3))
        await works(sender, decode)


async def test_silent_receiver(links: LinkFactory) -> None:
    """It takes no bytes off the link: the sender's own timeout ends the wait."""
    faults = Faults(stall=threading.Event())
    async with DecodeEnd(FaultyLinks(links, faults)) as decode, PrefillEnd(links) as sender:
        ticket = decode.issue(2)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [random_pages(2)], last_chunk()))
        with pytest.raises(TransferTimeoutError):
            await transfer.wait_acknowledged(PATIENCE_S)
        assert isinstance(await decode.failure(ticket), TransferError)
        faults.stall.set()
        await works(sender, decode)


@pytest.mark.parametrize("after", range(6))
async def test_link_breaks_under_the_sender(links: LinkFactory, after: int) -> None:
    """B11: whichever block it breaks after, the transfer fails on both ends and is never taken for whole."""
    faults = Faults(break_after=after)
    async with DecodeEnd(links) as decode, PrefillEnd(FaultyLinks(links, faults)) as sender:
        ticket = decode.issue(9)
        with pytest.raises(PhasorError) as caught:
            await send_all(sender, ticket, random_pages(9), 3)
        assert isinstance(caught.value, TransferError | WorkerLostError)
        assert isinstance(await decode.failure(ticket), TransferError)
        assert TicketId(ticket.ticket_id) not in decode.last
        await until(lambda: sender.num_links == 0, "the dead link's end")
        faults.break_after = None
        await works(sender, decode)


async def test_link_breaks_at_the_receiver(links: LinkFactory) -> None:
    faults = Faults()
    async with DecodeEnd(FaultyLinks(links, faults)) as decode, PrefillEnd(links) as sender:
        await works(sender, decode)
        faults.links[0].close()
        ticket = decode.issue(2)
        with pytest.raises(TransferError):
            await send_all(sender, ticket, random_pages(2))
        assert isinstance(await decode.failure(ticket), TransferError)
        await works(sender, decode)


async def test_idle_link_goes_on_working(links: LinkFactory) -> None:
    """B17, D4: nothing about a link ages; its timeout is for waits in progress only."""
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        await works(sender, decode)
        await asyncio.sleep(1.5 * TIMEOUT_S)
        await works(sender, decode)
        assert decode.receiver.num_links == 1


async def test_nobody_listens(links: LinkFactory) -> None:
    """A dead worker costs all who want it one attempt, not one each."""
    async with PrefillEnd(links) as sender:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            ticket = pb.Ticket(
                ticket_id="tkt-x",
                decode_address=f"127.0.0.1:{taken.getsockname()[1]}",
                decode_incarnation="inc-x",
            )
            outcomes = await asyncio.gather(*(sender.open(ticket) for _ in range(5)), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {WorkerLostError, TransferTimeoutError}
        assert len({id(outcome) for outcome in outcomes}) == 1
        assert sender.num_links == 0


async def test_listens_and_never_answers(links: LinkFactory) -> None:
    async with PrefillEnd(links) as sender:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            ticket = pb.Ticket(
                ticket_id="tkt-x",
                decode_address=f"127.0.0.1:{mute.getsockname()[1]}",
                decode_incarnation="inc-x",
            )
            with pytest.raises((WorkerLostError, TransferTimeoutError)):
                await sender.open(ticket)


async def test_caller_that_is_cancelled_while_a_link_opens(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket = decode.issue(1, deadline_s=0.01)
        opening = asyncio.create_task(sender.open(ticket))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await works(sender, decode)
        assert decode.receiver.num_links == 1, "the attempt was thrown away"


async def test_link_that_gets_no_stream_ends(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, RawPeer(decode, links) as raw:
        link = await raw.offer()
        assert decode.receiver.num_links == 1
        await until(lambda: decode.receiver.num_links == 0, "the link's end")
        link.close()


async def test_newer_link_of_the_same_worker_replaces_the_old_one(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, RawPeer(decode, links) as raw:
        old = await raw.offer("link-old")
        stream = raw.stream()
        await stream.write(pb.Announcement(link_id="link-old"))
        new = await raw.offer("link-new")
        with pytest.raises(grpc.aio.AioRpcError, match="replaced"):
            await stream.read()
        old.close()
        new.close()
        await until(lambda: decode.receiver.num_links == 0, "the links' end")


PAGES = random_pages(2)


def announcement(ticket: pb.Ticket, **fields: Any) -> pb.Announcement:
    right = pb.Announcement(
        ticket_id=ticket.ticket_id, num_blocks=2, run_lengths=[2], checksum=checksum([PAGES])
    )
    for name, value in fields.items():
        if isinstance(value, Sequence) and not isinstance(value, bytes | str):
            del getattr(right, name)[:]
            getattr(right, name).extend(value)
        else:
            setattr(right, name, value)
    return right


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence": 1}, "came where 0 was next"),
        ({"run_lengths": [1]}, "do not make 2 blocks"),
        ({"run_lengths": [3, -1]}, "do not make 2 blocks"),
        ({"run_lengths": [2, 0]}, "do not make 2 blocks"),
        ({"num_blocks": -2, "run_lengths": [-2]}, "do not make -2 blocks"),
        ({"num_blocks": 2**30, "run_lengths": [2**30]}, "bytes was announced; at most"),
    ],
)
async def test_announcement_that_cannot_be_followed_ends_the_link(
    links: LinkFactory, fields: dict[str, Any], message: str
) -> None:
    async with DecodeEnd(links) as decode, RawPeer(decode, links) as raw, PrefillEnd(links) as sender:
        ticket = decode.issue(2, deadline_s=0.2)
        link, stream = await raw.offer(), raw.stream()
        await stream.write(pb.Announcement(link_id="link-raw"))
        await stream.write(announcement(ticket, **fields))
        with pytest.raises(grpc.aio.AioRpcError, match=message):
            await stream.read()
        link.close()
        assert isinstance(await decode.failure(ticket), TransferTimeoutError)
        await works(sender, decode)
        await until(lambda: decode.receiver.num_links == 1, "the bad link's end")


async def test_repeated_sequence_number_ends_the_link(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, RawPeer(decode, links) as raw, PrefillEnd(links) as sender:
        ticket = decode.issue(4)
        link, stream = await raw.offer(), raw.stream()
        await stream.write(pb.Announcement(link_id="link-raw"))
        await stream.write(announcement(ticket))
        await asyncio.to_thread(link.send, [PAGES])
        answer = await stream.read()
        assert (answer.sequence, answer.error) == (0, "")
        await stream.write(announcement(ticket, first_block=2))
        with pytest.raises(grpc.aio.AioRpcError, match="0 came where 1 was next"):
            await stream.read()
        assert "0 came where 1 was next" in str(await decode.failure(ticket))
        link.close()
        await works(sender, decode)


async def test_another_link_can_neither_continue_nor_void_a_ticket(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, RawPeer(decode, links) as raw, PrefillEnd(links) as sender:
        ticket, pages = decode.issue(4), random_pages(4, 8)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [pages[:2]]))
        await until(lambda: bool(decode.pages_of(ticket)[1].any()), "the first chunk")
        link, stream = await raw.offer(), raw.stream()
        await stream.write(pb.Announcement(link_id="link-raw"))
        await stream.write(announcement(ticket, first_block=2))
        await asyncio.to_thread(link.send, [PAGES])
        assert "another link" in (await stream.read()).error
        await stream.write(pb.Announcement(ticket_id=ticket.ticket_id, sequence=1, abort_reason="mine now"))
        await stream.write(announcement(ticket, sequence=2, first_block=2))
        await asyncio.to_thread(link.send, [PAGES])
        assert "another link" in (await stream.read()).error
        transfer.push(PageChunk(2, [pages[2:]], last_chunk()))
        await transfer.wait_acknowledged(PATIENCE_S)
        assert torch.equal(decode.pages_of(ticket), pages)
        stream.cancel()
        link.close()
        await works(sender, decode)


async def test_sender_that_ignores_the_window_is_held_and_then_dropped(links: LinkFactory) -> None:
    async with (
        DecodeEnd(links, hold=True, max_staging_bytes=3 * BLOCK_BYTES) as decode,
        RawPeer(decode, links) as raw,
        PrefillEnd(links) as sender,
    ):
        ticket = decode.issue(6)
        link, stream = await raw.offer(), raw.stream()
        await stream.write(pb.Announcement(link_id="link-raw"))
        for sequence in range(2):
            await stream.write(announcement(ticket, sequence=sequence, first_block=2 * sequence))
        await asyncio.to_thread(link.send, [PAGES])
        await decode.chunk(0)
        assert decode.receiver.staging_bytes == 2 * BLOCK_BYTES, "more was staged than allowed"
        with pytest.raises(grpc.aio.AioRpcError, match=r"were not placed in 1\.0 s"):
            await stream.read()
        assert isinstance(await decode.failure(ticket), TransferError)
        link.close()
        await at_rest(decode)
        await works(sender, decode)


@pytest.mark.parametrize("first", [None, "link-unknown", ""])
async def test_stream_without_a_link(links: LinkFactory, first: str | None) -> None:
    async with DecodeEnd(links) as decode, RawPeer(decode, links) as raw:
        stream = raw.stream()
        if first is not None:
            await stream.write(pb.Announcement(link_id=first))
        with pytest.raises(grpc.aio.AioRpcError, match=r"unknown here|no link was named"):
            await stream.read()


async def test_second_stream_and_second_offer_of_a_link_are_refused(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, RawPeer(decode, links) as raw:
        link, stream = await raw.offer(), raw.stream()
        await stream.write(pb.Announcement(link_id="link-raw"))
        await until(lambda: decode.receiver._links["link-raw"].streaming, "the first stream")
        second = raw.stream()
        await second.write(pb.Announcement(link_id="link-raw"))
        with pytest.raises(grpc.aio.AioRpcError, match="has a stream already"):
            await second.read()
        with pytest.raises(grpc.aio.AioRpcError, match="in use"):
            await raw.offer()
        stream.cancel()
        link.close()
        await until(lambda: decode.receiver.num_links == 0, "the link's end")


class _Bomb:
    """Executes code where anybody unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


async def test_garbage_and_pickles_at_every_port(links: LinkFactory, tmp_path: Path) -> None:
    """D5: nothing executes, and the next transfer works."""
    mark = tmp_path / "executed"
    payloads = [
        pickle.dumps(_Bomb(mark)),
        b"\x00" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        random.Random(1).randbytes(4096),
    ]
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        await works(sender, decode)
        rendezvous = await asyncio.to_thread(links.host, "link-attacked")
        ports = [decode.port] + ([rendezvous.port] if links.kind != "loopback" else [])
        for port in ports:
            for payload in payloads:
                await asyncio.to_thread(_throw_at, port, payload)
        assert not mark.exists()
        await works(sender, decode)


def _throw_at(port: int, payload: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as attacker:
        attacker.settimeout(0.2)
        try:
            attacker.sendall(payload)
            while attacker.recv(4096):
                pass
        except OSError:
            pass


async def test_rendezvous_listens_on_the_configured_address_only() -> None:
    rendezvous = await asyncio.to_thread(GlooLinks("127.0.0.1", TIMEOUT_S).host, "link-x")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", rendezvous.port), timeout=PATIENCE_S)
    socket.create_connection(("127.0.0.1", rendezvous.port), timeout=PATIENCE_S).close()


@pytest.mark.timeout(60)
async def test_many_pairings_interleave_without_a_deadlock(links: LinkFactory) -> None:
    """D2: two senders, two receivers, 200 random pairings, one in ten given up. The time-out is the watchdog."""
    chance = random.Random(7)

    async def one(sender: PageSender, decode: DecodeEnd, seed: int) -> None:
        num_blocks, ends_badly = chance.randint(0, 12), chance.random() < 0.1
        await asyncio.sleep(chance.random() * 0.5)
        ticket, pages = decode.issue(num_blocks), random_pages(num_blocks, seed)
        if not ends_badly:
            await send_all(sender, ticket, pages, chance.randint(2, 5))
            assert torch.equal(decode.pages_of(ticket), pages)
            return
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [pages[: num_blocks // 2]]))
        if chance.random() < 0.5:
            transfer.abort("at random")
            await decode.failure(ticket)
        else:
            decode.receiver.revoke(TicketId(ticket.ticket_id))

    async with (
        DecodeEnd(links) as d1,
        DecodeEnd(links) as d2,
        PrefillEnd(links) as p1,
        PrefillEnd(links) as p2,
    ):
        pairings = [(chance.choice([p1, p2]), chance.choice([d1, d2])) for _ in range(200)]
        await asyncio.gather(*(one(p, d, seed) for seed, (p, d) in enumerate(pairings)))
        for decode in (d1, d2):
            await at_rest(decode)
            assert decode.receiver.num_links == 2
            await works(p1, decode)
