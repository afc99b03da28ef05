"""A worker's page is its WorkerCounts, told with names and labels."""

import pytest

from phasor.core import metric_names as names
from phasor.engine.worker_metrics import WorkerMetrics
from phasor.v1.inference_pb2 import WorkerCounts

COUNTS = WorkerCounts(
    num_blocks=100, num_free_blocks=70, num_cached_blocks=20, num_running=3, num_waiting=2, num_open_tickets=4,
    staging_bytes=4096, prompt_tokens_computed_total=11, prompt_tokens_reused_total=12,
    tokens_generated_total=13, tokens_transferred_total=14, bytes_transferred_total=15, num_leaked_blocks=5,
    num_preemptions_total=6, num_transfer_failures_total=7,
)  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "labels", "value"),
    [
        (names.REQUESTS_RUNNING, {}, 3),
        (names.REQUESTS_WAITING, {}, 2),
        (names.KV_CACHE_USAGE, {}, 0.3),
        (names.KV_BLOCKS, {"state": "used"}, 30),
        (names.KV_BLOCKS, {"state": "cached"}, 20),
        (names.KV_BLOCKS, {"state": "free"}, 50),
        (names.WORKER_PROMPT_TOKENS, {"source": "computed"}, 11),
        (names.WORKER_PROMPT_TOKENS, {"source": "own_pool"}, 12),
        (names.WORKER_PROMPT_TOKENS, {"source": "transferred"}, 14),
        (names.WORKER_GENERATION_TOKENS, {}, 13),
        (names.KV_TRANSFER_BYTES, {}, 15),
        (names.TRANSFER_FAILURES, {}, 7),
        (names.PREEMPTIONS, {}, 6),
        (names.STAGING_BYTES, {}, 4096),
        (names.OPEN_TICKETS, {}, 4),
        (names.LEAKED_BLOCKS, {}, 5),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_count_is_on_the_page(metric: names.Metric, labels: dict[str, str], value: float) -> None:
    registry = WorkerMetrics("decode", lambda: COUNTS).registry
    assert registry.get_sample_value(metric.name, {"role": "decode", **labels}) == value


def test_counts_are_asked_once_per_scrape_and_not_before() -> None:
    asked = []

    def counts() -> WorkerCounts:
        asked.append(1)
        return COUNTS

    registry = WorkerMetrics("prefill", counts).registry
    assert not asked
    list(registry.collect())
    assert len(asked) == 1


def test_hand_overs_are_a_histogram() -> None:
    metrics = WorkerMetrics("prefill", WorkerCounts)
    metrics.transferred(0.003)
    metrics.transferred(0.3)
    get = metrics.registry.get_sample_value
    assert get("phasor_kv_transfer_seconds_count", {"role": "prefill"}) == 2
    assert get("phasor_kv_transfer_seconds_bucket", {"role": "prefill", "le": "0.005"}) == 1


def test_a_worker_without_blocks_yet_has_a_usage_of_0() -> None:
    registry = WorkerMetrics("decode", WorkerCounts).registry
    assert registry.get_sample_value("phasor_kv_cache_usage_ratio", {"role": "decode"}) == 0
