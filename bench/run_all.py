"""Run every benchmark, one after the other, and keep the rows in `bench/results/<date>-<kind of host>.jsonl`.

Arguments go to each benchmark. With `--smoke` nothing is kept. A benchmark that fails does not stop the others; the
exit status is then 1, and the rows of the rest are kept.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import harness

RESULTS = harness.REPOSITORY / "bench" / "results"


def host_kind() -> str:
    """Return a file name's part for machines like this one, such as "amd-epyc-9r45-2-cores"."""
    words = re.findall(r"[a-z0-9]+", harness.cpu_name().lower().replace("(r)", ""))
    return "-".join([*(word for word in words if word != "processor"), str(os.cpu_count()), "cores"])


def run(benchmark: Path, arguments: Sequence[str]) -> tuple[list[str], int]:
    """Run one benchmark, show its rows as they come; returns them and its exit status."""
    rows = []
    command = [sys.executable, str(benchmark), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=harness.REPOSITORY) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            rows.append(line)
    return rows, process.returncode


def main() -> int:
    arguments = sys.argv[1:]
    failed, rows = [], []
    for benchmark in sorted((harness.REPOSITORY / "bench").glob("**/bench_*.py")):
        start_s = time.monotonic()
        found, status = run(benchmark, arguments)
        rows += found
        failed += [benchmark.name] if status else []
        sys.stderr.write(f"== {benchmark.name}: {len(found)} rows, {time.monotonic() - start_s:.0f} s\n")
    if "--smoke" not in arguments:
        RESULTS.mkdir(exist_ok=True)
        target = RESULTS / f"{datetime.now(UTC).date().isoformat()}-{host_kind()}.jsonl"
        target.write_text("".join(rows), encoding="utf-8")
        sys.stderr.write(f"== kept in {target.relative_to(harness.REPOSITORY)}\n")
        sys.stderr.write("== next: `make performance` renders docs/performance.md from it\n")
    if failed:
        sys.stderr.write(f"== failed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
