"""A worker's metrics: what `WorkerCounts` says at the moment of the scrape, and how long hand-overs took."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from phasor.core import metric_names as names
from phasor.core.metric_names import Metric
from phasor.v1.inference_pb2 import WorkerCounts

Family = CounterMetricFamily | GaugeMetricFamily


class WorkerMetrics:
    """One worker's registry. The engine thread never comes here: it counts integers, which are read at scrape time.

    Args:
        role: "prefill" or "decode".
        counts: returns what the worker holds and has done; called in the scraping thread.
    """

    def __init__(self, role: str, counts: Callable[[], WorkerCounts]) -> None:
        self.registry = CollectorRegistry()
        metric = names.KV_TRANSFER_SECONDS
        histogram = Histogram(
            metric.name, metric.text, metric.labels, buckets=metric.buckets, registry=self.registry
        )
        self._transfer_s = histogram.labels(role)
        self.registry.register(CountsCollector(role, counts))
        ProcessCollector(registry=self.registry)

    def transferred(self, transfer_s: float) -> None:
        """Note a completed hand-over (a prefill worker times them); any thread but the engine's."""
        self._transfer_s.observe(transfer_s)


class CountsCollector(Collector):
    """Turns one WorkerCounts into families."""

    def __init__(self, role: str, counts: Callable[[], WorkerCounts]) -> None:
        self._role, self._counts = role, counts

    def describe(self) -> Iterable[Family]:
        """Name the families without asking the worker."""
        return self._families(WorkerCounts())

    def collect(self) -> Iterable[Family]:
        """Ask the worker, once for all families."""
        return self._families(self._counts())

    def _families(self, counts: WorkerCounts) -> list[Family]:
        used = counts.num_blocks - counts.num_free_blocks
        blocks = {
            "used": used,
            "cached": counts.num_cached_blocks,
            "free": counts.num_free_blocks - counts.num_cached_blocks,
        }
        prompt_tokens = {
            "computed": counts.prompt_tokens_computed_total,
            "own_pool": counts.prompt_tokens_reused_total,
            "transferred": counts.tokens_transferred_total,
        }
        return [
            self._gauge(names.REQUESTS_RUNNING, counts.num_running),
            self._gauge(names.REQUESTS_WAITING, counts.num_waiting),
            self._gauge(names.KV_CACHE_USAGE, used / max(1, counts.num_blocks)),
            self._by_label(GaugeMetricFamily, names.KV_BLOCKS, blocks),
            self._by_label(CounterMetricFamily, names.WORKER_PROMPT_TOKENS, prompt_tokens),
            self._counter(names.WORKER_GENERATION_TOKENS, counts.tokens_generated_total),
            self._counter(names.KV_TRANSFER_BYTES, counts.bytes_transferred_total),
            self._counter(names.TRANSFER_FAILURES, counts.num_transfer_failures_total),
            self._counter(names.PREEMPTIONS, counts.num_preemptions_total),
            self._gauge(names.STAGING_BYTES, counts.staging_bytes),
            self._gauge(names.OPEN_TICKETS, counts.num_open_tickets),
            self._gauge(names.LEAKED_BLOCKS, counts.num_leaked_blocks),
        ]

    def _gauge(self, metric: Metric, value: float) -> Family:
        family = GaugeMetricFamily(metric.name, metric.text, labels=metric.labels)
        family.add_metric([self._role], value)
        return family

    def _counter(self, metric: Metric, value: float) -> Family:
        family = CounterMetricFamily(metric.name, metric.text, labels=metric.labels)
        family.add_metric([self._role], value)
        return family

    def _by_label(
        self,
        cls: type[CounterMetricFamily] | type[GaugeMetricFamily],
        metric: Metric,
        values: dict[str, int],
    ) -> Family:
        family = cls(metric.name, metric.text, labels=metric.labels)
        for label, value in values.items():
            family.add_metric([self._role, label], value)
        return family
