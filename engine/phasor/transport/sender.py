"""The prefill end: opens links to decode workers, and transfers on them.

    push (any thread) -> the link's queue -> link thread: checksum, announcement onto the gRPC stream, bytes onto
    the link -> acknowledgement -> the transfer is done when the last chunk's came

One link, one thread and one stream per decode worker incarnation; whatever breaks one of them ends all of its
transfers, and the next `open` builds a new link.
"""

import asyncio
import secrets

import grpc.aio

from phasor.core.config import TransportConfig
from phasor.core.errors import TransferError, WorkerLostError
from phasor.core.identity import Identity
from phasor.core.ids import Incarnation
from phasor.transport.connect import link_factory_for
from phasor.transport.link import Link, LinkFactory, Rendezvous
from phasor.transport.outgoing import LinkLimits, OutgoingLink, OutgoingTransfer, PageChunk, link_error
from phasor.v1 import worker_pb2 as pb
from phasor.v1 import worker_pb2_grpc
from phasor.wire.channels import connect
from phasor.wire.convert import identity_to_pb

__all__ = ["DEFAULT_LIMITS", "LinkLimits", "OutgoingTransfer", "PageChunk", "PageSender"]

DEFAULT_LIMITS = LinkLimits(
    max_piece_bytes=32 * 2**20, max_unacknowledged_bytes=128 * 2**20, min_run_bytes=2 * 2**20
)

_Key = tuple[str, str]


class PageSender:
    """Keeps one link per decode worker and opens transfers on them. Event loop only.

    Args:
        incarnation: this worker's.
        identity: what the other end must share.
        config: kind and timeout of links, and the address of this end.
        link_factory: opens links; of the configured kind by default.
        limits: how much a link takes on at once.
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        identity: Identity,
        config: TransportConfig,
        link_factory: LinkFactory | None = None,
        limits: LinkLimits = DEFAULT_LIMITS,
    ) -> None:
        self._incarnation, self._identity, self._config = incarnation, identity, config
        self._factory = link_factory or link_factory_for(config)
        self._limits = limits
        self._links: dict[_Key, OutgoingLink] = {}
        self._opening: dict[_Key, asyncio.Task[OutgoingLink]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_links(self) -> int:
        """Links that work."""
        return len(self._links)

    async def open(self, ticket: pb.Ticket) -> OutgoingTransfer:
        """Start a transfer to the ticket's decode worker, opening a link to it if there is none.

        Raises:
            LinkMismatchError: the workers' identities differ.
            WorkerLostError: the decode worker is gone or another incarnation.
            TransferError: the link cannot be opened, or this sender is closed.
        """
        if self._closed:
            raise TransferError("the prefill worker is stopping")
        key = (ticket.decode_address, ticket.decode_incarnation)
        link = self._links.get(key)
        if link is None:
            # All who want this link share one attempt, and its failure: a dead worker costs one timeout, not
            # one each. A caller that is cancelled leaves the attempt to the others.
            task = self._opening.get(key)
            if task is None:
                task = self._opening[key] = asyncio.create_task(self._connect(key), name=f"link to {key[0]}")
                task.add_done_callback(lambda done: self._opened(key, done))
            link = await asyncio.shield(task)
        return link.begin(ticket, self._config.timeout_s)

    async def close(self) -> None:
        """End all links; their transfers fail. Waits for link threads at most the links' timeout."""
        self._closed = True
        attempts = list(self._opening.values())
        for task in attempts:
            task.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
        links = list(self._links.values())
        for link in links:
            link.fail(TransferError("the prefill worker is stopping"))
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _opened(self, key: _Key, task: "asyncio.Task[OutgoingLink]") -> None:
        del self._opening[key]
        # The error is everybody's who waits; with nobody left, it is nobody's.
        if not task.cancelled():
            task.exception()

    async def _connect(self, key: _Key) -> OutgoingLink:
        address, incarnation = key
        peer = f"decode worker {address}"
        link_id = "link-" + secrets.token_hex(6)
        rendezvous = await asyncio.to_thread(self._factory.host, link_id)
        channel = connect(address)
        try:
            offer = self._offer(link_id, incarnation, rendezvous)
            accepted = await worker_pb2_grpc.PeerStub(channel).OpenLink(offer, timeout=self._config.timeout_s)
            if accepted.decode_incarnation != incarnation:
                raise WorkerLostError(f"{peer} is {accepted.decode_incarnation}, not {incarnation}")
            link: Link = await asyncio.to_thread(rendezvous.connect)
        except grpc.aio.AioRpcError as exc:
            await channel.close()
            raise link_error(exc, peer) from exc
        except BaseException:
            await channel.close()
            raise
        made = OutgoingLink(link_id, link, channel, peer, self._limits, lambda dead: self._drop(key, dead))
        self._links[key] = made
        return made

    def _offer(self, link_id: str, decode_incarnation: str, rendezvous: Rendezvous) -> pb.LinkOffer:
        return pb.LinkOffer(
            link_id=link_id,
            prefill_incarnation=self._incarnation,
            decode_incarnation=decode_incarnation,
            identity=identity_to_pb(self._identity),
            transport=self._factory.kind,
            store_host=rendezvous.host,
            store_port=rendezvous.port,
            timeout_s=self._config.timeout_s,
        )

    def _drop(self, key: _Key, link: OutgoingLink) -> None:
        """Forget a link that ended, and see it off: a stuck thread of it ends when its send times out."""
        if self._links.get(key) is link:
            del self._links[key]
        task = asyncio.create_task(link.close(self._config.timeout_s), name="closing a link")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
