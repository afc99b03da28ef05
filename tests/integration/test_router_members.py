"""Workers that come, go, restart, or do not fit."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from phasor.core.errors import (
    ConfigError,
    ModelNotFoundError,
)
from phasor.router.registry import Member
from phasor.v1 import inference_pb2 as pb
from tests.helpers.fake_workers import FakeWorker, make_identity
from tests.helpers.router_cluster import Cluster, eventually, read, running


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as started:
        await started.until_ready()
        yield started


async def test_a_worker_with_another_identity_is_not_used_and_the_field_is_named() -> None:
    async with running(num_decode=2) as cluster:
        await cluster.until_ready()
        odd = FakeWorker("decode", cluster.decode[0].wire, identity=make_identity(k_dtype="bfloat16"))
        await odd.start()
        cluster.router.set_members([*cluster.members(), Member("decode", odd.address)])
        await cluster.until(lambda: "k_dtype" in cluster.router.registry.snapshots()[-1].why_not)
        assert "'bfloat16'" in cluster.router.registry.snapshots()[-1].why_not
        info = await cluster.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
        assert [w.healthy for w in info.workers] == [True, True, True, False]
        for _ in range(4):
            await read(cluster.generate())
        assert odd.requests == []
        await odd.stop()


async def test_a_fleet_may_change_to_another_model_once_nobody_has_the_old_one() -> None:
    async with running(num_prefill=0) as cluster:
        await cluster.until_ready()
        (d,) = cluster.decode
        d.identity, d.served_name = make_identity(weights_digest="v" * 64), "new"
        await d.restart()

        async def is_listed() -> bool:
            return [m.name for m in (await cluster.stub.ListModels(pb.ListModelsRequest())).models] == ["new"]

        await eventually(is_listed)
        await cluster.until_ready()
        await read(cluster.generate(model="new"))
        assert isinstance(await cluster.refused(cluster.generate(model="tiny")), ModelNotFoundError)


async def test_a_worker_in_the_wrong_role_is_not_used() -> None:
    async with running(num_prefill=0) as cluster:
        await cluster.until_ready()
        stray = FakeWorker("prefill")
        await stray.start()
        cluster.router.set_members([*cluster.members(), Member("decode", stray.address)])
        await cluster.until(lambda: "WORKER_ROLE_PREFILL" in cluster.router.registry.snapshots()[-1].why_not)
        await stray.stop()


async def test_a_removed_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    """Case G11."""
    async with running(num_prefill=0, num_decode=2) as cluster:
        await cluster.until_ready()
        first, second = cluster.decode
        first.tokens.shut()
        second.tokens.shut()
        calls = [cluster.generate(), cluster.generate()]
        for call in calls:
            await call.read()
        cluster.router.set_members([Member("decode", second.address)])
        first.tokens.open()
        second.tokens.open()
        for call in calls:
            assert (await read(call))[0] == "BC"
        await cluster.until(lambda: len(cluster.router.registry.snapshots()) == 1)
        await read(cluster.generate())
        assert (len(first.requests), len(second.requests)) == (1, 2)
        # And it may come back.
        cluster.router.set_members(cluster.members())
        await cluster.until_ready()


async def test_members_come_and_go_under_load() -> None:
    """Case G10: no request breaks because the list of workers changes."""
    async with running(num_prefill=2, num_decode=2) as cluster:
        await cluster.until_ready()
        everyone = cluster.members()

        async def churn() -> None:
            while True:
                for gone in everyone:
                    cluster.router.set_members([member for member in everyone if member != gone])
                    await asyncio.sleep(0)
                    cluster.router.set_members(everyone)
                    await cluster.until_ready()

        churning = asyncio.create_task(churn())
        for _ in range(10):
            await asyncio.gather(*(read(cluster.generate()) for _ in range(5)))
        churning.cancel()
        await cluster.until_idle()


async def test_one_address_cannot_have_two_roles(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="a worker has one role"):
        cluster.router.set_members([Member("prefill", "127.0.0.1:1"), Member("decode", "127.0.0.1:1")])
