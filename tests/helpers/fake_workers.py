"""Prefill and decode workers without a model: real gRPC servers in this process, scripted by a test.

A fake decode worker answers a prompt with tokens that count up, one Delta each. By default it behaves like a real
one: it admits, waits for "pages" (a shared `FakeWire`) unless it reads the prompt itself, streams and finishes.
Gates hold it at a stage; refusals and a hook replace what it does.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio

from phasor.core.errors import PhasorError, WorkerLostError
from phasor.core.identity import Identity
from phasor.core.ids import Incarnation, new_incarnation, new_ticket_id
from phasor.router.policy import Role
from phasor.v1 import inference_pb2 as pb
from phasor.v1 import worker_pb2, worker_pb2_grpc
from phasor.wire import channels, convert, status

TINY_FOLDER = Path(__file__).parents[1] / "data" / "tiny-code-256"

Context = grpc.aio.ServicerContext[Any, Any]


def make_identity(**changes: Any) -> Identity:
    """An identity such as two workers of one deployment share."""
    values: dict[str, Any] = {
        "weights_digest": "w" * 64,
        "adapter_digest": "",
        "k_dtype": "float32",
        "v_dtype": "float32",
        "layers": (0, 1, 2, 3),
        "num_kv_heads": 2,
        "k_dim": 32,
        "v_dim": 32,
        "block_tokens": 16,
        "retention": "full",
        "rope_fingerprint": "r" * 64,
        "tier": 1.0,
        "position_basis": "absolute",
        "numerics_version": 1,
        "tenant_salt": "",
    }
    return Identity(**{**values, **changes})


class Gate:
    """Open unless shut; counts who is inside, so that a test can wait for a stage instead of sleeping."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.reached = asyncio.Event()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def pass_through(self) -> None:
        self.reached.set()
        await self._open.wait()


class FakeWire:
    """Stands for the links: a prefill worker sends a ticket's pages, a decode worker waits for them."""

    def __init__(self) -> None:
        self._arrived: dict[str, asyncio.Event] = {}

    def arrived(self, ticket_id: str) -> asyncio.Event:
        return self._arrived.setdefault(ticket_id, asyncio.Event())


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """One scripted worker process. `start` it, `stop` it; `restart` makes it another incarnation."""

    def __init__(self, role: Role, wire: FakeWire | None = None, *, identity: Identity | None = None) -> None:
        self.role: Role = role
        self.wire = wire or FakeWire()
        self.identity = identity or make_identity()
        self.incarnation: Incarnation = new_incarnation()
        self.address = ""
        self.ready = True
        self.served_name = "tiny"
        self.model_folder = str(TINY_FOLDER)
        self.max_model_len = 256
        self.num_blocks = 64
        self.counts = pb.WorkerCounts()
        self.refuse: PhasorError | None = None
        """Raised at once by Decode or Prefill."""
        self.refuse_late: PhasorError | None = None
        """Raised by Decode after its first Delta."""
        self.skip_finished = False
        """Decode ends its stream without Finished."""
        self.admission, self.pages, self.tokens, self.end, self.probes = (Gate() for _ in range(5))
        """Before Admitted; in Prefill before the pages go out; after each Delta; before Finished and before
        PrefillResponse; before GetCounts."""
        self.on_decode: Callable[[worker_pb2.DecodeRequest, Context], Awaitable[None]] | None = None
        self.requests: list[Any] = []
        self.num_active = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.num_cancelled = 0
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> str:
        self._server = channels.new_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        self.address = f"127.0.0.1:{bound}"
        return self.address

    async def stop(self) -> None:
        """Die at once: calls in flight break."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def restart(self) -> None:
        """Come back on the same port as another incarnation."""
        await self.stop()
        self.incarnation = new_incarnation()
        await self.start(int(self.address.rpartition(":")[2]))

    # --- the service -------------------------------------------------------------------------------------

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.WorkerDescription:
        return worker_pb2.WorkerDescription(
            role=pb.WORKER_ROLE_PREFILL if self.role == "prefill" else pb.WORKER_ROLE_DECODE,
            incarnation=self.incarnation,
            ready=self.ready,
            identity=convert.identity_to_pb(self.identity),
            rope=pb.RopeSummary(scheme="default", theta=10000.0, rotary_dim=32, trained_positions=256),
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            served_name=self.served_name,
            model_folder=self.model_folder,
            dtype="float32",
            max_running=8,
        )

    async def GetCounts(self, request: worker_pb2.GetCountsRequest, context: Context) -> pb.WorkerCounts:
        await self.probes.pass_through()
        return self.counts

    async def Decode(self, request: worker_pb2.DecodeRequest, context: Context) -> None:
        async with status.errors_to_status(context):
            await self._counted(request, self._decode(request, context))

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: Context
    ) -> worker_pb2.PrefillResponse:
        async with status.errors_to_status(context):
            response: worker_pb2.PrefillResponse = await self._counted(request, self._prefill(request))
            return response
        raise AssertionError("errors_to_status aborts")

    async def _counted(self, request: Any, work: Awaitable[Any]) -> Any:
        self.requests.append(request)
        self.num_active += 1
        self.idle.clear()
        try:
            return await work
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_active -= 1
            if self.num_active == 0:
                self.idle.set()

    def _check(self, incarnation: str) -> None:
        if incarnation != self.incarnation:
            raise WorkerLostError(f"this is incarnation {self.incarnation}, not {incarnation}")
        if self.refuse is not None:
            raise self.refuse

    async def _decode(self, request: worker_pb2.DecodeRequest, context: Context) -> None:
        self._check(request.incarnation)
        if self.on_decode is not None:
            await self.on_decode(request, context)
            return
        await self.admission.pass_through()
        ticket = worker_pb2.Ticket(
            ticket_id=new_ticket_id(), decode_address=self.address, decode_incarnation=self.incarnation
        )
        admitted = worker_pb2.Admitted() if request.local_prefill else worker_pb2.Admitted(ticket=ticket)
        await context.write(worker_pb2.DecodeEvent(admitted=admitted))
        if not request.local_prefill:
            await self.wire.arrived(ticket.ticket_id).wait()
        async for event in self._reply(request):
            await context.write(event)

    async def _reply(self, request: worker_pb2.DecodeRequest) -> AsyncIterator[worker_pb2.DecodeEvent]:
        num_tokens = request.sampling.max_tokens
        for number in range(num_tokens):
            token = (65 + number) % 256
            yield worker_pb2.DecodeEvent(delta=pb.Delta(text=chr(token), token_ids=[token]))
            if self.refuse_late is not None:
                raise self.refuse_late
            await self.tokens.pass_through()
        await self.end.pass_through()
        if self.skip_finished:
            return
        usage = pb.Usage(completion_tokens=num_tokens)
        timing = pb.Timing()
        if request.local_prefill:
            usage.decode_computed_tokens = len(request.token_ids)
            timing.prefill_s = 0.5
        finished = worker_pb2.DecodeFinished(
            choices=[pb.ChoiceEnd(finish_reason=pb.FINISH_REASON_LENGTH, completion_tokens=num_tokens)],
            usage=usage,
            timing=timing,
        )
        yield worker_pb2.DecodeEvent(finished=finished)

    async def _prefill(self, request: worker_pb2.PrefillRequest) -> worker_pb2.PrefillResponse:
        self._check(request.incarnation)
        await self.pages.pass_through()
        self.wire.arrived(request.ticket.ticket_id).set()
        await self.end.pass_through()
        num_tokens = len(request.token_ids)
        return worker_pb2.PrefillResponse(
            cached_tokens=0,
            computed_tokens=num_tokens,
            transferred_tokens=num_tokens,
            transferred_bytes=1000 * num_tokens,
            queue_s=0.25,
            prefill_s=0.5,
            transfer_s=0.125,
        )
