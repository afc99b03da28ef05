"""Every benchmark still runs, in its shortest form, and prints rows that say what they measured."""

import json
import subprocess
import sys

import pytest

from tests.packaging.repository import REPOSITORY, repository_files

BENCHMARKS = repository_files("bench/bench_*.py", "bench/*/bench_*.py")


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_benchmark_prints_complete_rows(benchmark: str) -> None:
    command = [sys.executable, str(REPOSITORY / benchmark), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows
    for row in rows:
        assert 0 < row["p20"] <= row["p50"] <= row["p80"]
        assert row["ratio"] > 0
        assert {"name", "unit", "baseline", "config", "device", "commit", "date"} <= set(row)
