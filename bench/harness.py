"""Times a callable and prints one JSON line per measurement: p20, p50, p80, the ratio to a baseline, the setting.

Measures wall time on this machine only; asserts nothing about it.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds per operation at three points of the distribution."""

    p20_s: float
    p50_s: float
    p80_s: float

    def per(self, num_operations: int) -> "Spread":
        """Return the spread of one operation where each run did `num_operations`."""
        return Spread(
            p20_s=self.p20_s / num_operations,
            p50_s=self.p50_s / num_operations,
            p80_s=self.p80_s / num_operations,
        )


def measure(run: Callable[[], object], *, num_operations: int, budget_s: float, min_runs: int = 5) -> Spread:
    """Call `run` until the budget is spent, after one warm-up call, and at least `min_runs` times.

    Args:
        run: does `num_operations` operations.
        num_operations: what a run's time is divided by.
        budget_s: when to stop starting new runs.
        min_runs: fewest runs that the percentiles are taken from.
    """
    run()
    samples: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(samples) < min_runs or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start_s) / num_operations)
    return spread_of(samples)


def measure_interleaved(
    runs: dict[str, Callable[[], object]], *, budget_s: float, min_runs: int = 5
) -> dict[str, Spread]:
    """Call all of `runs` in turn, one warm-up call each first: what disturbs the machine disturbs all of them.

    Args:
        runs: by name; each call is one operation.
        budget_s: when to stop starting new rounds.
        min_runs: fewest rounds that the percentiles are taken from.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    end_s = time.perf_counter() + budget_s
    num_rounds = 0
    while num_rounds < min_runs or time.perf_counter() < end_s:
        num_rounds += 1
        for name, run in runs.items():
            start_s = time.perf_counter()
            run()
            samples[name].append(time.perf_counter() - start_s)
    return {name: spread_of(taken) for name, taken in samples.items()}


def constant(seconds: float) -> Spread:
    """Return a computed time, such as a floor, as a baseline."""
    return Spread(p20_s=seconds, p50_s=seconds, p80_s=seconds)


def report(
    name: str,
    config: dict[str, Any],
    spread: Spread,
    baseline: Spread,
    *,
    baseline_name: str,
    goal_ratio: float | None = None,
    unit: str = "us per operation",
    scale: float = 1e6,
    more: dict[str, float] | None = None,
) -> None:
    """Print one row: the measurement, what it is compared with, and everything needed to repeat it.

    Args:
        name: what was measured.
        config: all that decides the result, beside the machine and the versions.
        spread: the measurement.
        baseline: what it is divided by.
        baseline_name: what that is.
        goal_ratio: what the ratio should be at most, where there is a goal.
        unit: of p20, p50, p80 and baseline_p50.
        scale: what the spreads are multiplied by to be in that unit.
        more: further results, by a name with its unit.
    """
    row = {
        "name": name,
        "unit": unit,
        **{f"p{p}": round(getattr(spread, f"p{p}_s") * scale, 4) for p in (20, 50, 80)},
        "baseline": baseline_name,
        "baseline_p50": round(baseline.p50_s * scale, 4),
        **(more or {}),
        "ratio": round(spread.p50_s / baseline.p50_s, 3),
        **({} if goal_ratio is None else {"goal_ratio": round(goal_ratio, 3)}),
        "config": config,
        **_setting(),
    }
    print(json.dumps(row), flush=True)


def arguments(description: str) -> argparse.Namespace:
    """Parse what every benchmark takes: `--budget-s` and `--smoke` (one short run, to see that it still works)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--budget-s", type=float, default=1.0, help="seconds per measurement")
    parser.add_argument("--smoke", action="store_true", help="the shortest run that executes everything")
    parsed = parser.parse_args()
    if parsed.smoke:
        parsed.budget_s = 0.0
    return parsed


def spread_of(samples: Sequence[float]) -> Spread:
    """Return the percentiles of at least two samples, in seconds."""
    # Inclusive: with two or three samples the other method invents values outside of what was measured.
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Spread(p20_s=fifths[0], p50_s=statistics.median(samples), p80_s=fifths[3])


def cpu_name() -> str:
    """Return what the processor calls itself, such as "AMD EPYC 9R45"; its architecture where it has no name."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.machine()


def _setting() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "torch": metadata.version("torch") if "torch" in sys.modules else "",
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
    }
