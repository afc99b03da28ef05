"""The names of Phasor's metrics, in one place so that code, docs and dashboards agree."""

TIME_TO_FIRST_TOKEN_S = "phasor_time_to_first_token_seconds"
INTER_TOKEN_LATENCY_S = "phasor_inter_token_latency_seconds"
KV_CACHE_USAGE_RATIO = "phasor_kv_cache_usage_ratio"
KV_TRANSFER_BYTES = "phasor_kv_transfer_bytes_total"
REQUESTS_RUNNING = "phasor_requests_running"
REQUESTS_WAITING = "phasor_requests_waiting"
BLOCKS_LEAKED = "phasor_blocks_leaked"
