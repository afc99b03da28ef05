"""Every metric that Phasor's processes expose: name, what it counts, labels, buckets. Nobody else spells a name.

Requests are counted by the router only, so that one request is one count however many workers served it. Workers
count their own work, under the label `role`; what both have (running and waiting requests) is told apart by it.
Counters' names end in `_total` here as they do on the page.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family."""

    name: str
    text: str
    """For its HELP line."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, in the name's unit."""


def _ladder(*bounds: float) -> tuple[float, ...]:
    assert list(bounds) == sorted(set(bounds)), "buckets go up"
    return bounds


# --- router: requests --------------------------------------------------------------------------------------

TIME_TO_FIRST_TOKEN = Metric(
    "phasor_time_to_first_token_seconds",
    "From a request's arrival at the router until its first token came from the decode worker.",
    buckets=_ladder(
        0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160
    ),
)
INTER_TOKEN_LATENCY = Metric(
    "phasor_inter_token_latency_seconds",
    "Between two tokens of one reply, as they reach the router.",
    buckets=_ladder(
        0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
        0.5, 0.75, 1, 2.5, 5, 10,
    ),
)  # fmt: skip
E2E_REQUEST_LATENCY = Metric(
    "phasor_e2e_request_latency_seconds",
    "From a request's arrival at the router until its last token; finished requests only.",
    buckets=_ladder(
        0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960
    ),
)
REQUEST_QUEUE = Metric(
    "phasor_request_queue_seconds",
    "From a request's arrival at the router until computing its prompt began; finished requests only.",
    buckets=_ladder(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160),
)
PROMPT_TOKENS = Metric("phasor_prompt_tokens_total", "Prompt tokens of finished requests.")
PROMPT_TOKENS_BY_SOURCE = Metric(
    "phasor_prompt_tokens_by_source_total",
    "Where the KV of finished requests' prompt tokens came from: computed for this request on the prefill worker "
    "(prefill_computed) or on the decode worker (decode_computed), held by the decode worker's own pool already "
    "(own_pool), or held by the prefill worker's pool and moved (transferred). Adds up to "
    "phasor_prompt_tokens_total, but for prompts read again after a preemption (decode_computed).",
    ("source",),
)
GENERATION_TOKENS = Metric(
    "phasor_generation_tokens_total", "Tokens that reached the router, of all requests, ended well or not."
)
REQUESTS = Metric(
    "phasor_requests_total",
    "Requests that ended. finish_reason is stop, length, abort (the client left) or error; code is the gRPC status.",
    ("finish_reason", "code"),
)
WORKERS = Metric("phasor_workers", "Workers that the router knows.", ("role", "state"))

# --- router and workers ------------------------------------------------------------------------------------

REQUESTS_RUNNING = Metric(
    "phasor_requests_running",
    "Requests being worked on: on a worker those that hold blocks, on the router those that a decode worker "
    "admitted.",
    ("role",),
)
REQUESTS_WAITING = Metric(
    "phasor_requests_waiting",
    "Requests not yet worked on: for a worker, those in its queue; for the router, those not admitted anywhere.",
    ("role",),
)

# --- workers -----------------------------------------------------------------------------------------------

WORKER_PROMPT_TOKENS = Metric(
    "phasor_worker_prompt_tokens_total",
    "Prompt tokens by what this worker did for them: computed, reused from its own pool, or transferred (sent by a "
    "prefill worker, received by a decode worker).",
    ("role", "source"),
)
WORKER_GENERATION_TOKENS = Metric(
    "phasor_worker_generation_tokens_total", "Tokens in this decode worker's replies.", ("role",)
)
KV_CACHE_USAGE = Metric(
    "phasor_kv_cache_usage_ratio", "Share of the pool's blocks that requests hold, 0 to 1.", ("role",)
)
KV_BLOCKS = Metric(
    "phasor_kv_blocks",
    "Blocks of the pool: used (held by requests), cached (reusable content, free to take) or free.",
    ("role", "state"),
)
KV_TRANSFER_BYTES = Metric(
    "phasor_kv_transfer_bytes_total",
    "Bytes of pages that a prefill worker sent, or that a decode worker received intact.",
    ("role",),
)
KV_TRANSFER_SECONDS = Metric(
    "phasor_kv_transfer_seconds",
    "The exposed part of a hand-over: from the prompt's last chunk until the decode worker held every page.",
    ("role",),
    _ladder(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10),
)
STAGING_BYTES = Metric("phasor_staging_bytes", "Received pages that are not yet placed.", ("role",))
PREEMPTIONS = Metric(
    "phasor_preemptions_total", "Sequences whose blocks were taken, to be read again later.", ("role",)
)
LEAKED_BLOCKS = Metric(
    "phasor_leaked_blocks",
    "Blocks that the idle check found held although nothing runs; anything but 0 is a bug.",
    ("role",),
)
OPEN_TICKETS = Metric("phasor_open_tickets", "Transfers that have not ended.", ("role",))
TRANSFER_FAILURES = Metric(
    "phasor_transfer_failures_total",
    "Transfers that broke: damaged, refused, timed out, or their link ended.",
    ("role",),
)

TOKEN_SOURCES = ("prefill_computed", "decode_computed", "own_pool", "transferred")
"""Values of `source` at the router."""


def all_metrics() -> list[Metric]:
    """Return every metric, in the order above."""
    return [value for value in globals().values() if isinstance(value, Metric)]
