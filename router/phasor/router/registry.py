"""The workers a router may use: who they are, whether they live, what it has in flight on each.

Every member has one loop that asks Describe and GetCounts once a second. Health never touches the in-flight
counts: those change by `acquire` and `Lease.release` only, and belong to one incarnation, not to an address.
Everything runs on one event loop; nothing here chooses workers (`policy`) or follows requests (`lifecycle`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from phasor.core.errors import ConfigError, DeadlineExceededError, PhasorError, WorkerLostError
from phasor.core.ids import Incarnation
from phasor.router.policy import Role, WorkerRef, WorkerSnapshot
from phasor.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from phasor.wire import channels, convert, status

_log = logging.getLogger(__name__)

_ROLES: dict[Role, int] = {
    "prefill": inference_pb2.WORKER_ROLE_PREFILL,
    "decode": inference_pb2.WORKER_ROLE_DECODE,
}

OnLost = Callable[[PhasorError], None]


@dataclass(frozen=True, slots=True)
class Member:
    """A worker's place in the deployment; the process behind it may change."""

    role: Role
    address: str
    """host:port of its gRPC service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryTimings:
    """How health is watched, in seconds."""

    poll_s: float = 1.0
    """Between two questions to a usable worker."""
    retry_s: float = 0.2
    """Between two questions to a worker that is not usable yet."""
    probe_timeout_s: float = 2.0
    """How long an answer may take."""
    max_missed: int = 3
    """After so many unanswered questions a worker that still holds its connection is lost. A worker that is
    merely busy answers within one; a connection that is gone needs no counting."""


def check_members(members: Sequence[Member]) -> None:
    """Refuse a list that cannot be meant.

    Raises:
        ConfigError: one address is given for both roles.
    """
    roles: dict[str, Role] = {}
    for member in members:
        if roles.setdefault(member.address, member.role) != member.role:
            hint = "is given as prefill and as decode worker; a worker has one role"
            raise ConfigError("router.members", member.address, hint)


def worker_states(registry: "Registry") -> list[tuple[str, str]]:
    """Return (role, "healthy" or "unhealthy") of every member; any thread."""
    return [(s.ref.role, "unhealthy" if s.why_not else "healthy") for s in registry.snapshots()]


class Lease:
    """One request counted as in flight on one incarnation, until `release`."""

    def __init__(self, leases: "set[Lease]", on_lost: OnLost, on_release: Callable[[], None]) -> None:
        self._leases, self._on_lost, self._on_release = leases, on_lost, on_release
        leases.add(self)

    def release(self) -> None:
        """Stop counting. Idempotent."""
        if self in self._leases:
            self._leases.remove(self)
            self._on_release()

    def _lost(self, error: PhasorError) -> None:
        self._on_lost(error)


@dataclass(slots=True)
class _Record:
    """What is known about one member."""

    member: Member
    channel: grpc.aio.Channel
    stub: Any
    description: worker_pb2.WorkerDescription | None = None
    counts: inference_pb2.WorkerCounts = field(default_factory=inference_pb2.WorkerCounts)
    problem: str = "not reached yet"
    num_missed: int = 0
    leaving: bool = False
    leases: dict[Incarnation, set[Lease]] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.description.incarnation if self.description else "")

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(role=self.member.role, address=self.member.address, incarnation=self.incarnation)

    @property
    def num_leases(self) -> int:
        return sum(len(leases) for leases in self.leases.values())


class Registry:
    """Members, their health and the requests in flight on them. Needs a running event loop; `close` it.

    Args:
        timings: how health is watched.
    """

    def __init__(self, timings: RegistryTimings | None = None) -> None:
        self._timings = timings or RegistryTimings()
        self._records: dict[Member, _Record] = {}
        self._reference: worker_pb2.WorkerDescription | None = None
        self.changed = asyncio.Event()
        """Set when a member comes, goes, or becomes usable or unusable; whoever waits for it clears it."""

    def set_members(self, members: Sequence[Member]) -> None:
        """Replace the members.

        New ones are asked at once. Removed ones get no new requests, and are forgotten when those in flight
        have ended.

        Raises:
            ConfigError: one address is given for both roles.
        """
        check_members(members)
        for member, record in self._records.items():
            record.leaving = member not in members
            record.wake.set()
        for member in dict.fromkeys(members):
            if member not in self._records:
                channel = channels.connect(member.address)
                stub = worker_pb2_grpc.WorkerStub(channel)
                record = _Record(member, channel, stub)
                self._records[member] = record
                record.task = asyncio.create_task(self._watch(record), name=f"watch {member.address}")
        self._settle_reference()
        self.changed.set()

    @property
    def reference(self) -> worker_pb2.WorkerDescription | None:
        """The description whose identity all used workers share; None before the first one answered."""
        return self._reference

    def descriptions(self, role: Role) -> list[worker_pb2.WorkerDescription]:
        """Return the descriptions of usable workers of `role`."""
        usable = [r for r in self._records.values() if r.member.role == role and not self._why_not(r)]
        return [record.description for record in usable if record.description is not None]

    def snapshots(self) -> list[WorkerSnapshot]:
        """Return every member's state for the policy, in the order of the members."""
        return [self._snapshot(record) for record in list(self._records.values())]

    def summaries(self) -> list[inference_pb2.WorkerSummary]:
        """Return every member's state for GetServerInfo."""
        return [
            inference_pb2.WorkerSummary(
                role=_ROLES[record.member.role],  # type: ignore[arg-type]
                address=record.member.address,
                incarnation=record.incarnation,
                healthy=not self._why_not(record),
                counts=record.counts,
                metrics_address=record.description.metrics_address if record.description else "",
            )
            for record in self._records.values()
        ]

    def num_in_flight(self) -> int:
        """Return the number of leases that have not been released, over all workers. 0 when idle."""
        return sum(record.num_leases for record in self._records.values())

    def acquire(self, worker: WorkerRef, on_lost: OnLost) -> Lease:
        """Count a request as in flight on `worker`.

        Args:
            worker: the incarnation that a snapshot named.
            on_lost: called at most once, on the event loop, when that incarnation is lost before the release.

        Raises:
            WorkerLostError: that incarnation is no longer there.
        """
        record = self._find(worker)
        leases = record.leases.setdefault(worker.incarnation, set())

        def forget() -> None:
            if not leases:
                record.leases.pop(worker.incarnation, None)
                record.wake.set()

        return Lease(leases, on_lost, forget)

    def stub(self, worker: WorkerRef) -> Any:
        """Return the gRPC stub that reaches `worker`.

        Raises:
            WorkerLostError: that incarnation is no longer there.
        """
        return self._find(worker).stub

    async def ask_counts(self, worker: WorkerRef) -> inference_pb2.WorkerCounts:
        """Ask `worker` for fresh counts, within the probe's timeout.

        Raises:
            PhasorError: it did not answer.
        """
        record = self._find(worker)
        try:
            counts: inference_pb2.WorkerCounts = await record.stub.GetCounts(
                worker_pb2.GetCountsRequest(), timeout=self._timings.probe_timeout_s
            )
        except grpc.aio.AioRpcError as exc:
            raise status.error_from_status(exc, peer=str(worker)) from exc
        return counts

    def suspect(self, worker: WorkerRef, why: str) -> None:
        """Do not use `worker` until it has answered again; a call to it has just failed. Asks it at once."""
        for record in self._records.values():
            if record.ref == worker:
                self._set_problem(record, why)
                record.wake.set()

    async def close(self) -> None:
        """Stop watching and close all channels. Idempotent."""
        records, self._records = list(self._records.values()), {}
        tasks = [record.task for record in records if record.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for record in records:
            await record.channel.close()

    # --- watching ----------------------------------------------------------------------------------------

    async def _watch(self, record: _Record) -> None:
        while not (record.leaving and record.num_leases == 0):
            try:
                await self._probe(record)
            except Exception:
                # The loop's top: one member's surprise must not end the watch over it.
                _log.exception("watching %s worker %s", record.member.role, record.member.address)
                self._set_problem(record, "watching it failed; see the router's log")
            await self._pause(record)
        # Forgotten before the first await, so that a member that returns now gets a record of its own.
        if self._records.get(record.member) is record:
            del self._records[record.member]
            self._settle_reference()
            self.changed.set()
        await record.channel.close()

    async def _pause(self, record: _Record) -> None:
        usable = not self._why_not(record)
        pause_s = self._timings.poll_s if usable else self._timings.retry_s
        record.wake.clear()
        if record.leaving and record.num_leases == 0:
            return
        try:
            async with asyncio.timeout(pause_s):
                await record.wake.wait()
        except TimeoutError:
            pass

    async def _probe(self, record: _Record) -> None:
        timeout_s = self._timings.probe_timeout_s
        try:
            description = await record.stub.Describe(worker_pb2.DescribeRequest(), timeout=timeout_s)
            counts = await record.stub.GetCounts(worker_pb2.GetCountsRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            error = status.error_from_status(exc, peer=f"{record.member.role} worker {record.member.address}")
            self._missed(record, error)
            return
        record.num_missed = 0
        record.counts = counts
        self._described(record, description)

    def _missed(self, record: _Record, error: PhasorError) -> None:
        record.num_missed += 1
        self._set_problem(record, str(error))
        silent = isinstance(error, DeadlineExceededError) and record.num_missed < self._timings.max_missed
        if not silent:
            self._lose(record, record.incarnation, WorkerLostError(f"{record.ref} is lost: {error}"))

    def _described(self, record: _Record, description: worker_pb2.WorkerDescription) -> None:
        old, new = record.ref, Incarnation(description.incarnation)
        record.description = description
        if old.incarnation and old.incarnation != new:
            _log.warning("%s was replaced by %s", old, new)
            self._lose(record, old.incarnation, WorkerLostError(f"{old} was replaced by incarnation {new}"))
            self.changed.set()
        self._settle_reference()
        self._set_problem(record, self._unfit(record, description))

    def _unfit(self, record: _Record, description: worker_pb2.WorkerDescription) -> str:
        if description.role != _ROLES[record.member.role]:
            name = inference_pb2.WorkerRole.Name(description.role)
            return f"it says that it is {name}, but it is a member as {record.member.role} worker"
        difference = self._difference(description)
        if difference:
            return difference
        return "" if description.ready else "not ready: its canary generation has not passed"

    def _difference(self, description: worker_pb2.WorkerDescription) -> str:
        """Name the first field in which a worker differs from those in use, or return ""."""
        reference = self._reference
        if reference is None:
            return ""
        ours = convert.identity_from_pb(reference.identity)
        differing = ours.first_difference(convert.identity_from_pb(description.identity))
        if differing is None and description.served_name != reference.served_name:
            differing = ("served_name", reference.served_name, description.served_name)
        if differing is None:
            return ""
        name, expected, found = differing
        return f"identity field {name!r} differs: {found!r}, the other workers have {expected!r}"

    def _settle_reference(self) -> None:
        """Keep the identity in use while any member has it; else take the first described member's."""
        described = [r for r in self._records.values() if r.description is not None and not r.leaving]
        kept = self._reference
        if kept is not None and any(
            r.description.identity == kept.identity for r in described if r.description
        ):
            return
        fitting = [r for r in described if r.description and r.description.role == _ROLES[r.member.role]]
        self._reference = fitting[0].description if fitting else None
        self.changed.set()

    def _lose(self, record: _Record, incarnation: Incarnation, error: PhasorError) -> None:
        for lease in list(record.leases.get(incarnation, ())):
            lease._lost(error)

    def _set_problem(self, record: _Record, problem: str) -> None:
        if problem == record.problem:
            return
        if bool(problem) != bool(record.problem):
            self.changed.set()
        record.problem = problem
        if problem:
            _log.warning("%s is not used: %s", record.ref, problem)
        else:
            _log.info("%s is ready", record.ref)

    # --- reading -----------------------------------------------------------------------------------------

    def _why_not(self, record: _Record) -> str:
        if record.leaving:
            return "leaving"
        return record.problem

    def _snapshot(self, record: _Record) -> WorkerSnapshot:
        description, counts = record.description, record.counts
        block_tokens = description.identity.block_tokens if description else 0
        return WorkerSnapshot(
            ref=record.ref,
            why_not=self._why_not(record),
            in_flight=len(record.leases.get(record.incarnation, ())),
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            num_free_blocks=counts.num_free_blocks,
            pool_tokens=block_tokens * description.num_blocks if description else 0,
            max_model_len=description.max_model_len if description else 0,
        )

    def _find(self, worker: WorkerRef) -> _Record:
        for record in self._records.values():
            if record.ref == worker:
                return record
        raise WorkerLostError(f"{worker} is no longer there")
