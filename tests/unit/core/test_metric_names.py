"""Names of metrics are a contract with dashboards: complete, unique, and as Prometheus wants them."""

import re
from pathlib import Path

import pytest

from phasor.core.metric_names import Metric, all_metrics

REPOSITORY = Path(__file__).parents[3]


def ids(metric: Metric) -> str:
    return metric.name


@pytest.mark.parametrize("metric", all_metrics(), ids=ids)
def test_a_metric_is_named_and_explained(metric: Metric) -> None:
    assert re.fullmatch(r"phasor_[a-z0-9_]+", metric.name)
    assert metric.text.endswith(".") and len(metric.text) > 15
    assert list(metric.buckets) == sorted(set(metric.buckets)) and all(b > 0 for b in metric.buckets)
    assert not metric.buckets or metric.name.endswith("_seconds")


def test_names_are_unique() -> None:
    names = [metric.name for metric in all_metrics()]
    assert len(names) == len(set(names)) > 15


@pytest.mark.parametrize("metric", all_metrics(), ids=ids)
def test_the_documentation_has_every_metric(metric: Metric) -> None:
    row = re.search(rf"^\| `{metric.name}` \|.*$", (REPOSITORY / "docs/metrics.md").read_text(), flags=re.M)
    assert row is not None
    assert all(f"`{label}`" in row.group() for label in metric.labels)
