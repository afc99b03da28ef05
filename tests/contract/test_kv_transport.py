"""What every kind of link must do for transfers when nothing breaks: the same suite over all of them."""

import asyncio
import logging
import threading
from dataclasses import fields, replace

import pytest
import torch

from phasor.core.errors import (
    LinkMismatchError,
    TransferError,
    TransferTimeoutError,
    WorkerLostError,
)
from phasor.core.identity import Identity
from phasor.core.ids import TicketId
from phasor.transport.link import LinkFactory
from phasor.transport.sender import LinkLimits, PageChunk
from phasor.v1 import worker_pb2 as pb
from tests.helpers.transfers import (
    BLOCK_SHAPE,
    IDENTITY,
    PATIENCE_S,
    SINGLE_RUNS,
    DecodeEnd,
    Faults,
    FaultyLinks,
    PrefillEnd,
    at_rest,
    changed,
    last_chunk,
    random_pages,
    send_all,
    until,
    works,
)

BLOCK_BYTES = BLOCK_SHAPE[0] * BLOCK_SHAPE[1] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
async def test_pages_arrive_byte_for_byte(links: LinkFactory, dtype: torch.dtype) -> None:
    async with DecodeEnd(links, dtype=dtype) as decode, PrefillEnd(links) as sender:
        ticket, pages = decode.issue(8), random_pages(8, 1, dtype)
        await send_all(sender, ticket, pages)
        assert torch.equal(decode.pages_of(ticket), pages)
        last = decode.last[TicketId(ticket.ticket_id)]
        assert (list(last.first_tokens), last.num_tokens) == ([42], 7)
        assert decode.receiver.bytes_received == pages.nbytes
        await at_rest(decode)


async def test_ticket_that_starts_behind_held_blocks(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket, pages = decode.issue(5, first_block=3), random_pages(5)
        await send_all(sender, ticket, pages)
        assert torch.equal(decode.pages_of(ticket), pages)


async def test_nothing_to_send_but_the_first_token(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket = decode.issue(0, first_block=6)
        await send_all(sender, ticket, random_pages(0))
        assert decode.last[TicketId(ticket.ticket_id)].first_tokens == [42]
        await at_rest(decode)


async def test_empty_runs_and_a_last_chunk_without_pages(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket, pages = decode.issue(3), random_pages(3)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [pages[:0], pages[:2], pages[2:2], pages[2:]]))
        transfer.push(PageChunk(3, [], last_chunk()))
        await transfer.wait_acknowledged(PATIENCE_S)
        assert torch.equal(decode.pages_of(ticket), pages)


async def test_large_chunk_goes_in_pieces(links: LinkFactory) -> None:
    """One chunk of 40 blocks where only 3 may be announced at once and 7 be under way."""
    limits = LinkLimits(max_piece_bytes=3 * BLOCK_BYTES + 1, max_unacknowledged_bytes=7 * BLOCK_BYTES)
    async with (
        DecodeEnd(links, max_staging_bytes=8 * BLOCK_BYTES) as decode,
        PrefillEnd(links, limits=limits) as sender,
    ):
        ticket, pages = decode.issue(40), random_pages(40)
        await send_all(sender, ticket, pages, chunk_blocks=40)
        assert torch.equal(decode.pages_of(ticket), pages)
        await at_rest(decode)


async def test_small_runs_go_as_one_message(links: LinkFactory) -> None:
    """Single blocks from all over the pool, several chunks of different sizes, each one message."""
    faults, limits = Faults(), replace(SINGLE_RUNS, min_run_bytes=2 * BLOCK_BYTES)
    async with DecodeEnd(links) as decode, PrefillEnd(FaultyLinks(links, faults), limits=limits) as sender:
        ticket, pages = decode.issue(12), random_pages(12)
        transfer = await sender.open(ticket)
        for start, stop in ((0, 3), (3, 10), (10, 12)):
            last = last_chunk() if stop == 12 else None
            transfer.push(PageChunk(start, list(pages[start:stop].split(1)), last))
        await transfer.wait_acknowledged(PATIENCE_S)
        assert torch.equal(decode.pages_of(ticket), pages)
        assert faults.num_sent == 3
        await at_rest(decode)


async def test_staging_is_used_again_only_after_its_answer(links: LinkFactory) -> None:
    async with DecodeEnd(links, hold=True) as decode, PrefillEnd(links) as sender:
        ticket, pages = decode.issue(8), random_pages(8)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [pages[:2]]))
        transfer.push(PageChunk(2, [pages[2:4]]))
        first, second = await decode.chunk(0), await decode.chunk(1)
        decode.place(first)
        # A second answer must not give the memory back again: it is another chunk's by now.
        first.acknowledge("")
        transfer.push(PageChunk(4, [pages[4:6]]))
        transfer.push(PageChunk(6, [pages[6:]], last_chunk()))
        for event in (second, await decode.chunk(2), await decode.chunk(3)):
            decode.place(event)
        await transfer.wait_acknowledged(PATIENCE_S)
        assert torch.equal(decode.pages_of(ticket), pages)
        await at_rest(decode)


async def test_transfers_share_one_link_and_may_interleave(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        tickets = [decode.issue(7) for _ in range(8)]
        pages = [random_pages(7, seed) for seed in range(8)]
        await asyncio.gather(
            *(send_all(sender, ticket, page, 2) for ticket, page in zip(tickets, pages, strict=True))
        )
        for ticket, page in zip(tickets, pages, strict=True):
            assert torch.equal(decode.pages_of(ticket), page)
        assert (sender.num_links, decode.receiver.num_links) == (1, 1)
        await at_rest(decode)


async def test_push_from_another_thread(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket, pages = decode.issue(2), random_pages(2)
        transfer = await sender.open(ticket)
        engine = threading.Thread(target=transfer.push, args=(PageChunk(0, [pages], last_chunk()),))
        engine.start()
        await transfer.wait_acknowledged(PATIENCE_S)
        engine.join()
        assert torch.equal(decode.pages_of(ticket), pages)


@pytest.mark.parametrize("name", [field.name for field in fields(Identity)])
async def test_any_difference_in_identity_is_refused_by_name_on_both_ends(
    links: LinkFactory, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = changed(IDENTITY, name)
    async with DecodeEnd(links) as decode, PrefillEnd(links, identity=theirs) as sender:
        with caplog.at_level(logging.WARNING), pytest.raises(LinkMismatchError, match=name) as caught:
            await sender.open(decode.issue(1, deadline_s=0.01))
        assert caught.value.field == name
        assert str(getattr(theirs, name)) in str(caught.value)
        assert any(name in record.getMessage() for record in caplog.records)
        assert (sender.num_links, decode.receiver.num_links) == (0, 0)
        await at_rest(decode)


async def test_another_kind_of_link_is_refused(links: LinkFactory) -> None:
    other = FaultyLinks(links, Faults())
    other.kind = "pigeons"
    async with DecodeEnd(links) as decode, PrefillEnd(other) as sender:
        with pytest.raises(LinkMismatchError, match=r"transport.*pigeons"):
            await sender.open(decode.issue(1, deadline_s=0.01))


async def test_another_incarnation_is_refused_and_the_right_one_taken(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket = decode.issue(1, deadline_s=0.01)
        ticket.decode_incarnation = "inc-before-the-restart"
        with pytest.raises(WorkerLostError, match="inc-before-the-restart"):
            await sender.open(ticket)
        await works(sender, decode)


async def test_decode_worker_restarts_at_the_same_address(links: LinkFactory) -> None:
    """B10: the new incarnation is another worker; nothing of the old link is used again."""
    async with PrefillEnd(links) as sender:
        port, old_ticket = 0, None
        for round_number in range(5):
            async with DecodeEnd(links, port=port) as decode:
                if old_ticket is not None:
                    await until(lambda: sender.num_links == 0, "the old link's end")
                    with pytest.raises(WorkerLostError, match="restarted"):
                        await sender.open(old_ticket)
                await works(sender, decode, round_number)
                port, old_ticket = decode.port, decode.issue(1)


async def test_unknown_ticket_is_refused_and_the_link_lives(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        await works(sender, decode)
        wrong = decode.issue(2)
        decode.receiver.revoke(TicketId(wrong.ticket_id))
        wrong.ticket_id = "tkt-of-nobody"
        with pytest.raises(TransferError, match="no such ticket"):
            await send_all(sender, wrong, random_pages(2))
        await works(sender, decode)
        assert decode.receiver.num_links == sender.num_links == 1
        assert decode.failures == {}


@pytest.mark.parametrize(
    ("first", "num_blocks", "message"),
    [(0, 5, "ends at 4"), (1, 3, "0 is next"), (0, 3, "last chunk ends at block 3")],
    ids=["too many", "not the next", "too few"],
)
async def test_blocks_outside_the_ticket_void_it(
    links: LinkFactory, first: int, num_blocks: int, message: str
) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket = decode.issue(4)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(first, [random_pages(num_blocks)], last_chunk()))
        with pytest.raises(TransferError, match=message):
            await transfer.wait_acknowledged(PATIENCE_S)
        assert message in str(await decode.failure(ticket))
        assert not decode.pages_of(ticket).any(), "refused pages were placed"
        await works(sender, decode)
        assert decode.receiver.num_links == 1


async def test_one_flipped_bit_is_found(links: LinkFactory) -> None:
    """A12: a damaged block is a failed transfer, and none of it is placed."""
    faults = Faults(flip=True)
    async with DecodeEnd(links) as decode, PrefillEnd(FaultyLinks(links, faults)) as sender:
        ticket = decode.issue(4)
        with pytest.raises(TransferError, match="checksum"):
            await send_all(sender, ticket, random_pages(4), 4)
        assert "checksum" in str(await decode.failure(ticket))
        assert not decode.pages_of(ticket).any()
        await works(sender, decode)
        assert decode.receiver.num_links == 1, "a damaged chunk is no reason to end a link"


async def test_owner_refuses_a_chunk(links: LinkFactory) -> None:
    async with DecodeEnd(links, hold=True) as decode, PrefillEnd(links) as sender:
        ticket = decode.issue(2)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [random_pages(2)], last_chunk()))
        (await decode.chunk()).acknowledge("the request has ended here")
        with pytest.raises(TransferError, match="the request has ended here"):
            await transfer.wait_acknowledged(PATIENCE_S)
        await at_rest(decode)
        assert decode.failures == {}, "the owner knows what it did"
        await works(sender, decode)


async def test_second_and_late_acknowledgements_change_nothing(links: LinkFactory) -> None:
    async with DecodeEnd(links, hold=True) as decode, PrefillEnd(links) as sender:
        first, second = decode.issue(2), decode.issue(2)
        transfers = [await sender.open(ticket) for ticket in (first, second)]
        for transfer in transfers:
            transfer.push(PageChunk(0, [random_pages(1)]))
        chunk, late = await decode.chunk(0), await decode.chunk(1)
        chunk.acknowledge("")
        chunk.acknowledge("")
        chunk.acknowledge("no, wait")
        assert decode.receiver.num_open_tickets == 2
        decode.receiver.revoke(TicketId(second.ticket_id))
        late.acknowledge("")
        with pytest.raises(TransferError, match="revoked"):
            await transfers[1].wait_acknowledged(PATIENCE_S)
        decode.hold = False
        transfers[0].push(PageChunk(1, [random_pages(1)], last_chunk()))
        await transfers[0].wait_acknowledged(PATIENCE_S)
        await works(sender, decode)


async def test_revoked_between_chunks(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket = decode.issue(4)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [random_pages(2)]))
        await until(lambda: bool(decode.pages_of(ticket)[1].any()), "the first chunk")
        decode.receiver.revoke(TicketId(ticket.ticket_id))
        decode.receiver.revoke(TicketId(ticket.ticket_id))
        assert decode.receiver.num_open_tickets == 0
        transfer.push(PageChunk(2, [random_pages(2)], last_chunk()))
        with pytest.raises(TransferError, match="revoked"):
            await transfer.wait_acknowledged(PATIENCE_S)
        assert decode.failures == {}
        assert not decode.pages_of(ticket)[2:].any()
        await works(sender, decode)


async def test_revoked_while_its_bytes_are_on_the_link(links: LinkFactory) -> None:
    """A1, A7: the late write lands in staging, and whoever got the blocks next keeps what is theirs."""
    faults = Faults(stall=threading.Event())
    async with DecodeEnd(links) as decode, PrefillEnd(FaultyLinks(links, faults)) as sender:
        ticket = decode.issue(2)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [random_pages(2)], last_chunk()))
        await until(lambda: decode.receiver.staging_bytes == 2 * BLOCK_BYTES, "staging")
        decode.receiver.revoke(TicketId(ticket.ticket_id))
        assert decode.receiver.num_open_tickets == 0
        decode.pages_of(ticket).fill_(7.0)
        with pytest.raises(TransferError, match="revoked"):
            await transfer.wait_acknowledged(PATIENCE_S)
        faults.stall.set()
        await at_rest(decode)
        assert (decode.pages_of(ticket) == 7.0).all()
        await works(sender, decode)
        assert decode.receiver.num_links == 1


async def test_aborted_between_chunks(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket, other = decode.issue(4), decode.issue(3)
        transfer, other_transfer = await sender.open(ticket), await sender.open(other)
        transfer.push(PageChunk(0, [random_pages(2)]))
        other_transfer.push(PageChunk(0, [random_pages(3, 5)], last_chunk()))
        transfer.abort("the client went away")
        transfer.abort("twice")
        transfer.push(PageChunk(2, [random_pages(2)], last_chunk()))
        assert "the client went away" in str(await decode.failure(ticket))
        with pytest.raises(TransferError, match="the client went away"):
            await transfer.wait_acknowledged(PATIENCE_S)
        await other_transfer.wait_acknowledged(PATIENCE_S)
        assert torch.equal(decode.pages_of(other), random_pages(3, 5))
        other_transfer.abort("too late to matter")
        await works(sender, decode)
        assert decode.receiver.num_links == 1


async def test_aborted_before_anything_was_pushed(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket = decode.issue(4)
        (await sender.open(ticket)).abort("")
        assert "gave up" in str(await decode.failure(ticket))
        await works(sender, decode)


async def test_aborted_while_its_bytes_are_on_the_link(links: LinkFactory) -> None:
    faults = Faults(stall=threading.Event())
    async with DecodeEnd(links) as decode, PrefillEnd(FaultyLinks(links, faults)) as sender:
        ticket, pages = decode.issue(2), random_pages(2)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [pages], last_chunk()))
        await until(lambda: decode.receiver.staging_bytes > 0, "staging")
        transfer.abort("preempted")
        pages.fill_(float("nan"))
        faults.stall.set()
        assert isinstance(await decode.failure(ticket), TransferError)
        assert not decode.pages_of(ticket).any()
        await works(sender, decode)
        assert decode.receiver.num_links == 1


async def test_deadline_without_a_single_announcement(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket = decode.issue(4, deadline_s=0.05)
        assert isinstance(await decode.failure(ticket), TransferTimeoutError)
        await at_rest(decode)
        with pytest.raises(TransferError, match="expired"):
            await send_all(sender, ticket, random_pages(4))
        await works(sender, decode)


async def test_deadline_in_the_middle(links: LinkFactory) -> None:
    async with DecodeEnd(links, hold=True) as decode, PrefillEnd(links) as sender:
        ticket = decode.issue(4, deadline_s=0.3)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [random_pages(2)]))
        assert isinstance(await decode.failure(ticket), TransferTimeoutError)
        with pytest.raises(TransferError, match="no complete transfer within"):
            await transfer.wait_acknowledged(PATIENCE_S)
        await works(sender, decode)


async def test_wait_has_its_own_deadline(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        ticket = decode.issue(1)
        transfer = await sender.open(ticket)
        with pytest.raises(TransferTimeoutError, match=r"not acknowledged within 0.0 s"):
            await transfer.wait_acknowledged(0.01)
        transfer.abort("tired of waiting")
        await decode.failure(ticket)
        await works(sender, decode)


async def test_busy_decode_worker_holds_the_sender_back_and_is_not_dead(links: LinkFactory) -> None:
    """Six blocks fit: the seventh waits, longer than the link's timeout, until pages are placed."""
    limits = LinkLimits(max_piece_bytes=2 * BLOCK_BYTES, max_unacknowledged_bytes=6 * BLOCK_BYTES)
    async with DecodeEnd(links, hold=True) as decode, PrefillEnd(links, limits=limits) as sender:
        ticket, pages = decode.issue(20), random_pages(20)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [pages], last_chunk()))
        await decode.chunk(2)
        with pytest.raises(TransferTimeoutError):
            await transfer.wait_acknowledged(1.5)
        assert decode.receiver.staging_bytes == 6 * BLOCK_BYTES
        for index in range(10):
            decode.place(await decode.chunk(index))
        await transfer.wait_acknowledged(PATIENCE_S)
        assert torch.equal(decode.pages_of(ticket), pages)
        await works(sender, decode)


@pytest.mark.parametrize("end", ["abort", "deadline", "revoke"])
async def test_transfer_that_waits_for_room_ends_too(links: LinkFactory, end: str) -> None:
    limits = LinkLimits(max_piece_bytes=BLOCK_BYTES, max_unacknowledged_bytes=2 * BLOCK_BYTES)
    async with DecodeEnd(links, hold=True) as decode, PrefillEnd(links, limits=limits) as sender:
        ticket = decode.issue(6, deadline_s=0.4 if end == "deadline" else PATIENCE_S)
        transfer = await sender.open(ticket)
        transfer.push(PageChunk(0, [random_pages(6)], last_chunk()))
        await decode.chunk(1)
        if end == "abort":
            transfer.abort("enough")
        elif end == "revoke":
            decode.receiver.revoke(TicketId(ticket.ticket_id))
        with pytest.raises(TransferError):
            await transfer.wait_acknowledged(PATIENCE_S)
        await at_rest(decode)
        await works(sender, decode)


async def test_closing_either_end_ends_its_transfers(links: LinkFactory) -> None:
    async with DecodeEnd(links) as decode, PrefillEnd(links) as sender:
        begun, waiting = decode.issue(2), decode.issue(2)
        transfer = await sender.open(begun)
        transfer.push(PageChunk(0, [random_pages(1)]))
        await until(lambda: bool(decode.pages_of(begun)[0].any()), "the first chunk")
        await sender.close()
        with pytest.raises(TransferError, match="stopping"):
            await transfer.wait_acknowledged(PATIENCE_S)
        assert isinstance(await decode.failure(begun), TransferError)
        assert decode.receiver.num_open_tickets == 1
        await decode.receiver.close()
        assert "stopping" in str(await decode.failure(waiting))
        await at_rest(decode)
        with pytest.raises(TransferError, match="stopping"):
            await sender.open(pb.Ticket())
