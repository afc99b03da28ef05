"""The demo's tables, from made-up numbers."""

import io

from rich.console import Console

from phasor.core.request import Timing, Usage
from phasor.deploy.demo_report import Answer, requests_table, workers_table
from phasor.v1 import inference_pb2


def shown(table) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return [line.split() for line in console.file.getvalue().splitlines() if line.strip(" ─")]


def answer(**changes) -> Answer:
    usage = Usage(
        prompt_tokens=60,
        completion_tokens=11,
        cached_tokens=48,
        prefill_computed_tokens=12,
        transferred_tokens=60,
        transferred_bytes=2_764_800,
    )
    values = {
        "question": "?",
        "text": "!",
        "usage": usage,
        "timing": Timing(),
        "first_token_s": 0.5,
        "total_s": 1.5,
        **changes,
    }
    return Answer(**values)


def test_tokens_per_second_counts_the_tokens_after_the_first():
    assert answer().tokens_per_s == 10.0
    assert answer(first_token_s=1.5).tokens_per_s == 0.0


def test_the_requests_table_fits_80_columns_and_holds_every_number():
    rows = shown(requests_table([answer()]))
    assert rows[-1] == ["1", "60", "12", "48", "60", "2,764,800", "11", "0.500", "10.0"]


def test_the_workers_table_numbers_workers_of_a_role():
    counts = inference_pb2.WorkerCounts(
        prompt_tokens_computed_total=12,
        prompt_tokens_reused_total=48,
        tokens_transferred_total=60,
        tokens_generated_total=0,
        bytes_transferred_total=2_764_800,
    )
    prefill = inference_pb2.WorkerSummary(role=inference_pb2.WORKER_ROLE_PREFILL, counts=counts)
    decode = inference_pb2.WorkerSummary(role=inference_pb2.WORKER_ROLE_DECODE)
    rows = shown(workers_table([prefill, decode, prefill]))
    assert rows[-3:] == [
        ["prefill-0", "12", "48", "60", "0", "2,764,800"],
        ["decode-0", "0", "0", "0", "0", "0"],
        ["prefill-1", "12", "48", "60", "0", "2,764,800"],
    ]
