"""The router's metrics: every client request once, from its arrival to its one ending."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from phasor.core import metric_names as names
from phasor.core.metric_names import Metric
from phasor.core.request import FinishedReply, Usage

ROLE = "router"


class RouterMetrics:
    """One router's registry and what is counted in it. Event loop only, but for scraping.

    Args:
        num_in_flight: returns how many requests have not ended; asked at scrape time, in another thread.
        workers: returns (role, "healthy" or "unhealthy") of every worker; asked likewise.
    """

    def __init__(
        self, *, num_in_flight: Callable[[], int], workers: Callable[[], Sequence[tuple[str, str]]]
    ) -> None:
        self.registry = CollectorRegistry()
        self.num_admitted = 0
        self.first_token = self._histogram(names.TIME_TO_FIRST_TOKEN)
        self.inter_token = self._histogram(names.INTER_TOKEN_LATENCY)
        self.e2e = self._histogram(names.E2E_REQUEST_LATENCY)
        self.queue = self._histogram(names.REQUEST_QUEUE)
        self.prompt_tokens = self._counter(names.PROMPT_TOKENS)
        self.generation_tokens = self._counter(names.GENERATION_TOKENS)
        self.requests = self._counter(names.REQUESTS)
        by_source = self._counter(names.PROMPT_TOKENS_BY_SOURCE)
        # Every source is shown from the start: a rate over a series that is not there is no rate.
        self.by_source = {source: by_source.labels(source) for source in names.TOKEN_SOURCES}
        self.registry.register(_Gauges(self, num_in_flight, workers))
        ProcessCollector(registry=self.registry)

    def begin(self, arrived_s: float) -> "RequestRecord":
        """Follow a request that arrived at `arrived_s`, in the router's monotonic seconds."""
        return RequestRecord(self, arrived_s)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(
            metric.name, metric.text, metric.labels, buckets=metric.buckets, registry=self.registry
        )

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.text, metric.labels, registry=self.registry)


class RequestRecord:
    """What one request adds to the metrics. Made by `RouterMetrics.begin`; one of its endings counts."""

    def __init__(self, metrics: RouterMetrics, arrived_s: float) -> None:
        self._metrics, self._arrived_s = metrics, arrived_s
        self._is_admitted = self._has_ended = False
        self._last_token_s: dict[int, float] = {}

    def admitted(self) -> None:
        """A decode worker took the request."""
        if not self._is_admitted:
            self._is_admitted = True
            self._metrics.num_admitted += 1

    def made_tokens(self, now_s: float, *, choice: int, num_tokens: int) -> None:
        """Tokens of one reply reached the router."""
        if num_tokens == 0:
            return
        if not self._last_token_s:
            self._metrics.first_token.observe(now_s - self._arrived_s)
        last_s = self._last_token_s.get(choice)
        if last_s is not None:
            # Tokens that come together: the gap is shared among them.
            for _ in range(num_tokens):
                self._metrics.inter_token.observe((now_s - last_s) / num_tokens)
        self._last_token_s[choice] = now_s
        self._metrics.generation_tokens.inc(num_tokens)

    def finished(self, reply: FinishedReply) -> None:
        """The request was answered in full."""
        metrics = self._metrics
        metrics.prompt_tokens.inc(reply.usage.prompt_tokens)
        for source, num_tokens in tokens_by_source(reply.usage).items():
            metrics.by_source[source].inc(num_tokens)
        metrics.queue.observe(reply.timing.queue_s)
        metrics.e2e.observe(reply.timing.total_s)
        self.end(reply.choices[0].reason, "OK")

    def end(self, finish_reason: str, code: str) -> None:
        """Count the request, unless it was."""
        if self._has_ended:
            return
        self._has_ended = True
        self._metrics.num_admitted -= self._is_admitted
        self._metrics.requests.labels(finish_reason, code).inc()


def tokens_by_source(usage: Usage) -> dict[str, int]:
    """Return each source's share of a finished request's prompt tokens; see `metric_names`."""
    # What crossed the link and was not computed for this request lay in the prefill worker's pool; what was
    # cached and did not cross it lay in the decode worker's.
    moved = max(0, usage.transferred_tokens - usage.prefill_computed_tokens)
    return {
        "prefill_computed": usage.prefill_computed_tokens,
        "decode_computed": usage.decode_computed_tokens,
        "own_pool": max(0, usage.cached_tokens - moved),
        "transferred": moved,
    }


class _Gauges(Collector):
    def __init__(
        self,
        metrics: RouterMetrics,
        num_in_flight: Callable[[], int],
        workers: Callable[[], Sequence[tuple[str, str]]],
    ) -> None:
        self._metrics, self._num_in_flight, self._workers = metrics, num_in_flight, workers

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Name the families without asking anybody."""
        return [_gauge(m) for m in (names.REQUESTS_RUNNING, names.REQUESTS_WAITING, names.WORKERS)]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return what is so at this moment."""
        num_running = self._metrics.num_admitted
        running, waiting = _gauge(names.REQUESTS_RUNNING), _gauge(names.REQUESTS_WAITING)
        running.add_metric([ROLE], num_running)
        waiting.add_metric([ROLE], max(0, self._num_in_flight() - num_running))
        workers = _gauge(names.WORKERS)
        found = self._workers()
        for role in ("prefill", "decode"):
            for state in ("healthy", "unhealthy"):
                workers.add_metric([role, state], found.count((role, state)))
        return [running, waiting, workers]


def _gauge(metric: Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.text, labels=metric.labels)
