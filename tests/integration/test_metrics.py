"""Metrics and logs of real processes on the tiny model: one request is one count, and one id in three logs."""

import json
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from phasor.v1 import inference_pb2 as pb
from phasor.v1 import inference_pb2_grpc
from tests.helpers.calls import generate, generate_together, greedy
from tests.helpers.cluster import Cluster, Process, cluster, until
from tests.helpers.models import TINY_FOLDER

pytestmark = pytest.mark.timeout(300)

JSON_LOGS = ("--log-format", "json")
SMALL = ("--kv-memory", "2MiB", "--block-tokens", "4", "--max-step-tokens", "32")
SECRET = "zebra_xylophone"


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with cluster(TINY_FOLDER, worker_args=(*SMALL, *JSON_LOGS), router_args=JSON_LOGS) as running:
        yield running


class Page(dict[str, float]):
    """One scrape: `name{label="value",...}` to value; what is not there is 0."""

    def __missing__(self, key: str) -> float:
        return 0.0

    def since(self, before: "Page") -> "Page":
        return Page({key: value - before[key] for key, value in self.items() if value != before[key]})

    def total(self, name: str) -> float:
        return sum(value for key, value in self.items() if key.partition("{")[0] == name)


def scrape(process: Process) -> Page:
    with urllib.request.urlopen(f"http://{process.ready['metrics_address']}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    page = Page()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            page[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return page


def events(process: Process, request_id: str) -> list[dict[str, object]]:
    lines = process.log.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return [row for row in rows if row.get("request_id") == request_id]


def test_ten_requests_are_ten_counts_and_every_prompt_token_has_one_source(pair: Cluster) -> None:
    processes = [pair.router, pair.prefill[0], pair.decode[0]]
    before = [scrape(process) for process in processes]
    prompts = [list(f"class Number{n}:\n    value = {n}\n".encode()) for n in range(5)]
    # The second five are known to both workers' pools but for their ends.
    replies = [
        *generate_together(pair.address, prompts, greedy(9)),
        *generate_together(pair.address, prompts, greedy(9)),
    ]
    pair.wait_baseline()
    router, prefill, decode = (scrape(p).since(b) for p, b in zip(processes, before, strict=True))
    num_prompt = 2 * sum(map(len, prompts))
    assert sum(page.total("phasor_requests_total") for page in (router, prefill, decode)) == 10
    assert router['phasor_requests_total{code="OK",finish_reason="length"}'] == 10
    assert router["phasor_prompt_tokens_total"] == num_prompt
    assert router["phasor_generation_tokens_total"] == sum(len(reply.token_ids) for reply in replies) == 90
    assert router.total("phasor_prompt_tokens_by_source_total") == num_prompt
    assert router['phasor_prompt_tokens_by_source_total{source="decode_computed"}'] == 0
    assert router['phasor_prompt_tokens_by_source_total{source="own_pool"}'] > 0
    for name, count in (("time_to_first_token", 10), ("e2e_request_latency", 10), ("request_queue", 10)):
        assert router[f"phasor_{name}_seconds_count"] == count
    assert router["phasor_inter_token_latency_seconds_count"] == 80
    # The workers' own books agree with the router's.
    worker_tokens = 'phasor_worker_prompt_tokens_total{{role="{}",source="{}"}}'.format
    computed = router['phasor_prompt_tokens_by_source_total{source="prefill_computed"}']
    assert prefill[worker_tokens("prefill", "computed")] == computed > 0
    assert decode[worker_tokens("decode", "computed")] == 0
    sent = prefill[worker_tokens("prefill", "transferred")]
    assert (
        sent
        == decode[worker_tokens("decode", "transferred")]
        == sum(r.usage.transferred_tokens for r in replies)
    )
    assert decode['phasor_worker_generation_tokens_total{role="decode"}'] == 90
    sent_bytes = prefill['phasor_kv_transfer_bytes_total{role="prefill"}']
    assert sent_bytes == decode['phasor_kv_transfer_bytes_total{role="decode"}'] > 0
    assert prefill['phasor_kv_transfer_seconds_count{role="prefill"}'] == 10


WORKER_GAUGES = ("leaked_blocks", "open_tickets", "staging_bytes", "kv_cache_usage_ratio")


def test_idle_gauges_are_there_and_0(pair: Cluster) -> None:
    """Read with `dict.__getitem__`'s strictness: a gauge that is missing or misspelt is no 0."""
    pair.wait_baseline()
    for process, role in ((pair.router, "router"), (pair.prefill[0], "prefill"), (pair.decode[0], "decode")):
        page = dict(scrape(process))
        for name in ("requests_running", "requests_waiting", *(WORKER_GAUGES if role != "router" else ())):
            assert page[f'phasor_{name}{{role="{role}"}}'] == 0, name
        if role != "router":
            assert page[f'phasor_kv_blocks{{role="{role}",state="used"}}'] == 0
        knows_workers = any(key.startswith("phasor_workers{") for key in page)
        assert knows_workers == (role == "router"), f"{role}: only the router knows workers"
    assert dict(scrape(pair.router))['phasor_workers{role="prefill",state="healthy"}'] == 1


def test_a_running_request_is_seen_running_and_an_aborted_one_is_counted_as_such(pair: Cluster) -> None:
    before = scrape(pair.router)
    with grpc.insecure_channel(pair.address) as channel:
        request = pb.GenerateRequest(
            prompt="while True:", sampling=greedy(200, ignore_eos=True), request_id="gone"
        )
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
        next(call)
        assert scrape(pair.router)['phasor_requests_running{role="router"}'] == 1
        assert scrape(pair.decode[0])['phasor_requests_running{role="decode"}'] == 1
        assert scrape(pair.decode[0])['phasor_kv_cache_usage_ratio{role="decode"}'] > 0
        call.cancel()
    pair.wait_baseline()
    aborted = 'phasor_requests_total{code="CANCELLED",finish_reason="abort"}'
    until(lambda: scrape(pair.router).since(before)[aborted] == 1, "the aborted request's count")
    after = scrape(pair.router).since(before)
    assert after.total("phasor_requests_total") == 1
    assert after["phasor_prompt_tokens_total"] == 0 and after["phasor_generation_tokens_total"] >= 1
    failed = [row for row in events(pair.router, "gone") if row["event"] == "failed"]
    assert [row["code"] for row in failed] == ["CANCELLED"]


def test_failed_requests_are_counted_by_code(pair: Cluster) -> None:
    before = scrape(pair.router)
    for prompt, max_tokens, timeout_s in ((SECRET, 0, 60.0), ([1] * 250, 200, 60.0), ([7] * 20, 200, 0.05)):
        with pytest.raises(grpc.RpcError):
            generate(pair.address, prompt, greedy(max_tokens, ignore_eos=True), timeout_s=timeout_s)
    pair.wait_baseline()
    refused = 'phasor_requests_total{code="INVALID_ARGUMENT",finish_reason="error"}'
    # Whose clock rings first, the router's or the client's, is open.
    late = ("DEADLINE_EXCEEDED", "CANCELLED")
    until(lambda: scrape(pair.router).since(before).total("phasor_requests_total") == 3, "three counts")
    after = scrape(pair.router).since(before)
    assert after[refused] == 2
    assert (
        sum(
            v for k, v in after.items() if k.startswith("phasor_requests_total") and any(c in k for c in late)
        )
        == 1
    )


def test_one_request_id_is_in_three_logs_and_its_prompt_in_none(pair: Cluster) -> None:
    with grpc.insecure_channel(pair.address) as channel:
        request = pb.GenerateRequest(prompt=SECRET, sampling=greedy(5), request_id="follow-me")
        list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60))
    expected = [
        (pair.router, ["accepted", "finished"]),
        (pair.prefill[0], ["prefilled", "transferred"]),
        (pair.decode[0], ["admitted", "finished"]),
    ]
    for process, names in expected:
        until(lambda p=process, n=names: len(events(p, "follow-me")) >= len(n), "the lines of a request")  # type: ignore[misc]
        rows = events(process, "follow-me")
        assert [row["event"] for row in rows] == names
        assert all(row["level"] == "INFO" and str(row["time"]).endswith("Z") for row in rows)
        assert SECRET not in process.log.read_text(encoding="utf-8")
    finished = events(pair.router, "follow-me")[-1]
    assert finished["completion_tokens"] == 5 and finished["finish_reason"] == "length"
    assert 0 < float(str(finished["first_token_s"])) <= float(str(finished["total_s"]))


def test_the_server_says_where_each_process_is_read(pair: Cluster) -> None:
    with grpc.insecure_channel(pair.address) as channel:
        info = inference_pb2_grpc.InferenceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=5)
    assert info.metrics_address == pair.router.ready["metrics_address"]
    said = {worker.address: worker.metrics_address for worker in info.workers}
    assert said == {process.address: process.ready["metrics_address"] for process in pair.workers}
