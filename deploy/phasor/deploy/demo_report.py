"""The tables at the end of `phasor demo`: where every token of two requests came from, and what it took."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from phasor.core.request import Timing, Usage
from phasor.v1 import inference_pb2

_ROLES = {
    inference_pb2.WORKER_ROLE_PREFILL: "prefill",
    inference_pb2.WORKER_ROLE_DECODE: "decode",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request of the demo, ended."""

    question: str
    text: str
    usage: Usage
    timing: Timing
    first_token_s: float
    """As the client saw it: from sending the request to the first text."""
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Return tokens per second after the first one; 0 when there was only one."""
        seconds = self.total_s - self.first_token_s
        return (self.usage.completion_tokens - 1) / seconds if seconds > 0 else 0.0


def workers_table(workers: Sequence[inference_pb2.WorkerSummary]) -> Table:
    """Return one row per worker: prompt tokens computed, reused, transferred; tokens generated; bytes moved."""
    table = _table("Tokens by worker", "worker")
    for header in ("computed", "reused", "transferred", "generated", "bytes moved"):
        table.add_column(header, justify="right")
    seen: Counter[str] = Counter()
    for worker in workers:
        counts, role = worker.counts, _ROLES.get(worker.role, "unknown")
        table.add_row(
            f"{role}-{seen[role]}",
            f"{counts.prompt_tokens_computed_total:,}",
            f"{counts.prompt_tokens_reused_total:,}",
            f"{counts.tokens_transferred_total:,}",
            f"{counts.tokens_generated_total:,}",
            f"{counts.bytes_transferred_total:,}",
        )
        seen[role] += 1
    return table


def requests_table(answers: Sequence[Answer]) -> Table:
    """Return one row per request: its prompt tokens by origin, time to first token, tokens per second."""
    table = _table("Tokens by question", "#")
    headers = ("prompt", "computed", "reused", "transferred", "bytes moved", "reply", "TTFT s", "tokens/s")
    for header in headers:
        table.add_column(header, justify="right")
    for number, answer in enumerate(answers, 1):
        usage = answer.usage
        table.add_row(
            str(number),
            f"{usage.prompt_tokens:,}",
            f"{usage.prefill_computed_tokens + usage.decode_computed_tokens:,}",
            f"{usage.cached_tokens:,}",
            f"{usage.transferred_tokens:,}",
            f"{usage.transferred_bytes:,}",
            f"{usage.completion_tokens:,}",
            f"{answer.first_token_s:.3f}",
            f"{answer.tokens_per_s:.1f}",
        )
    return table


def _table(title: str, first: str) -> Table:
    # Narrow enough for 80 columns, so that it survives a log file.
    table = Table(title=title, box=box.SIMPLE, title_justify="left", padding=(0, 0, 0, 1))
    table.add_column(first, no_wrap=True)
    return table
