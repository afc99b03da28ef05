"""Bundles and refusals, as numbers."""

import pytest

from phasor.core.config import FleetConfig, ModelConfig, ServingConfig, TransportConfig
from phasor.core.errors import ConfigError
from phasor.deploy.placement import (
    at_host,
    check_fleet,
    check_hosts,
    local_resources,
    roles,
    worker_placement,
)


def test_one_bundle_per_rank_with_what_the_configuration_gives():
    placement = worker_placement(FleetConfig(cpus_per_worker=1.0, gpus_per_worker=0.5))
    assert placement.bundles == ({"CPU": 1.0, "GPU": 0.5},)
    assert placement.strategy == "PACK"


def test_a_bundle_is_never_empty():
    (bundle,) = worker_placement(FleetConfig(cpus_per_worker=0.0)).bundles
    assert bundle == {"CPU": 0.001}


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        (FleetConfig(), (2, 0)),
        (FleetConfig(num_prefill=2, num_decode=3, cpus_per_worker=0.5), (3, 0)),
        (FleetConfig(cpus_per_worker=0.0), (1, 0)),
        (FleetConfig(gpus_per_worker=0.5), (2, 1)),
    ],
)
def test_a_local_ray_announces_enough_for_the_fleet(fleet, expected):
    assert local_resources(fleet) == expected
    bundles = [worker_placement(fleet).bundles[0] for _ in roles(fleet)]
    assert sum(bundle.get("CPU", 0) for bundle in bundles) <= expected[0]
    assert sum(bundle.get("GPU", 0) for bundle in bundles) <= expected[1]


def test_decode_workers_come_first():
    assert roles(FleetConfig(num_prefill=2, num_decode=1)) == ["decode", "prefill", "prefill"]


def test_tensor_parallelism_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"tensor_parallel=2: .*one rank"):
        check_fleet(ServingConfig(), num_ranks=2)


def test_cuda_without_a_share_of_a_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"fleet.gpus_per_worker=0: "):
        check_fleet(ServingConfig(model=ModelConfig(device="cuda")))
    check_fleet(ServingConfig(model=ModelConfig(device="cuda"), fleet=FleetConfig(gpus_per_worker=1)))


def test_auto_becomes_the_address_of_the_host_that_a_worker_is_placed_on():
    auto = ServingConfig(transport=TransportConfig(host="auto"))
    worker = at_host(auto, "10.0.0.7").worker("decode")
    assert (worker.host, worker.transport.host) == ("10.0.0.7", "10.0.0.7")
    assert at_host(ServingConfig(), "10.0.0.7").worker("decode").host == "127.0.0.1"


def test_workers_on_several_hosts_may_not_listen_on_loopback():
    check_hosts(ServingConfig(), num_hosts=1)
    check_hosts(ServingConfig(transport=TransportConfig(host="auto")), num_hosts=3)
    with pytest.raises(ConfigError, match=r"transport.host='127.0.0.1': .*--worker-host auto"):
        check_hosts(ServingConfig(), num_hosts=2)
