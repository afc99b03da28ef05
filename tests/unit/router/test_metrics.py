"""What one request adds to the router's metrics, ending by ending; no server, no clock."""

from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from phasor.core import metric_names as names
from phasor.core.request import ChoiceEnd, FinishedReply, FinishReason, Timing, Usage
from phasor.router.metrics import RouterMetrics, tokens_by_source


class Page:
    """A router's metrics and what a scrape of them says."""

    def __init__(self) -> None:
        self.num_in_flight = 0
        self.workers: list[tuple[str, str]] = []
        self.metrics = RouterMetrics(num_in_flight=lambda: self.num_in_flight, workers=lambda: self.workers)

    def __call__(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, labels)
        return -1.0 if value is None else value


def reply(**usage: Any) -> FinishedReply:
    ends = (ChoiceEnd(index=0, reason=FinishReason.LENGTH), ChoiceEnd(index=1, reason=FinishReason.STOP))
    timing = Timing(queue_s=0.02, first_token_s=0.5, total_s=2.0)
    return FinishedReply(choices=ends, usage=Usage(**usage), timing=timing)


def test_an_answered_request_counts_once() -> None:
    page = Page()
    record = page.metrics.begin(10.0)
    record.admitted()
    for now_s in (10.5, 10.6, 10.9):
        record.made_tokens(now_s, choice=0, num_tokens=1)
    record.finished(
        reply(prompt_tokens=7, completion_tokens=3, prefill_computed_tokens=7, transferred_tokens=7)
    )
    record.end("error", "INTERNAL")
    assert page("phasor_requests_total", finish_reason="length", code="OK") == 1
    assert page("phasor_requests_total", finish_reason="error", code="INTERNAL") == -1
    assert page("phasor_time_to_first_token_seconds_count") == 1
    assert page("phasor_time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert page("phasor_inter_token_latency_seconds_count") == 2
    assert page("phasor_inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert page("phasor_e2e_request_latency_seconds_sum") == 2.0
    assert page("phasor_request_queue_seconds_sum") == pytest.approx(0.02)
    assert (page("phasor_prompt_tokens_total"), page("phasor_generation_tokens_total")) == (7, 3)


def test_replies_to_one_prompt_have_gaps_of_their_own_and_one_first_token() -> None:
    page = Page()
    record = page.metrics.begin(0.0)
    for choice, now_s in ((0, 1.0), (1, 1.5), (0, 2.0), (1, 2.5)):
        record.made_tokens(now_s, choice=choice, num_tokens=1)
    assert page("phasor_time_to_first_token_seconds_count") == 1
    assert page("phasor_inter_token_latency_seconds_count") == 2
    assert page("phasor_inter_token_latency_seconds_sum") == pytest.approx(2.0)


def test_tokens_that_come_together_share_their_gap() -> None:
    page = Page()
    record = page.metrics.begin(0.0)
    record.made_tokens(1.0, choice=0, num_tokens=1)
    record.made_tokens(1.0, choice=0, num_tokens=0)
    record.made_tokens(1.4, choice=0, num_tokens=2)
    assert page("phasor_inter_token_latency_seconds_count") == 2
    assert page("phasor_inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert page("phasor_generation_tokens_total") == 3


@pytest.mark.parametrize("ending", [("abort", "CANCELLED"), ("error", "DEADLINE_EXCEEDED")])
def test_a_request_without_an_answer_counts_with_its_code_and_its_tokens(ending: tuple[str, str]) -> None:
    page = Page()
    record = page.metrics.begin(0.0)
    record.admitted()
    record.made_tokens(1.0, choice=0, num_tokens=1)
    record.end(*ending)
    assert page("phasor_requests_total", finish_reason=ending[0], code=ending[1]) == 1
    assert page("phasor_generation_tokens_total") == 1
    assert (page("phasor_prompt_tokens_total"), page("phasor_e2e_request_latency_seconds_count")) == (0, 0)
    assert page("phasor_requests_running", role="router") == 0


def test_gauges_are_read_at_scrape_time() -> None:
    page = Page()
    page.num_in_flight, page.workers = 3, [("decode", "healthy"), ("decode", "unhealthy")]
    record = page.metrics.begin(0.0)
    record.admitted()
    record.admitted()
    assert page("phasor_requests_running", role="router") == 1
    assert page("phasor_requests_waiting", role="router") == 2
    assert page("phasor_workers", role="decode", state="healthy") == 1
    assert page("phasor_workers", role="prefill", state="healthy") == 0


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        # Read by the prefill worker, and sent.
        ({"prefill_computed_tokens": 100, "transferred_tokens": 100}, (100, 0, 0, 0)),
        # The prefill worker's pool held 64 of them, the decode worker's 32 of those.
        ({"prefill_computed_tokens": 36, "transferred_tokens": 68, "cached_tokens": 64}, (36, 0, 32, 32)),
        # The decode worker's pool held more than the prefill worker's: nothing that was not computed moved.
        ({"prefill_computed_tokens": 68, "transferred_tokens": 36, "cached_tokens": 32}, (68, 0, 32, 0)),
        # Read by the decode worker itself.
        ({"decode_computed_tokens": 52, "cached_tokens": 48}, (0, 52, 48, 0)),
    ],
)
def test_sources_add_up_to_the_prompt(usage: dict[str, int], expected: tuple[int, ...]) -> None:
    found = tokens_by_source(Usage(prompt_tokens=100, **usage))
    assert tuple(found[source] for source in names.TOKEN_SOURCES) == expected
    assert sum(expected) == 100


def test_a_prompt_read_again_shows_as_computed_by_the_decode_worker() -> None:
    usage = Usage(
        prompt_tokens=10, prefill_computed_tokens=10, transferred_tokens=10, decode_computed_tokens=8
    )
    assert sum(tokens_by_source(usage).values()) == 18


def test_two_routers_in_one_process_share_nothing_and_the_page_parses() -> None:
    one, other = Page(), Page()
    one.metrics.begin(0.0).end("abort", "CANCELLED")
    assert other("phasor_requests_total", finish_reason="abort", code="CANCELLED") == -1
    families = list(text_string_to_metric_families(generate_latest(one.metrics.registry).decode()))
    assert {family.name for family in families} >= {"phasor_time_to_first_token_seconds", "phasor_requests"}
