"""What the router adds to a request: through `Generate`, and by calling the same workers directly, in turns.

The direct driver does what a router must: `Decode`, and for a pair the ticket from its first answer handed to
`Prefill`. It tokenises nothing, chooses nothing and checks nothing. Prompts are new every time: no prefix is cached.
"""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import harness
import servers

from phasor.v1 import inference_pb2, worker_pb2

TINY_FOLDER = harness.REPOSITORY / "tests" / "data" / "tiny-code-256"
PROMPT_TOKENS, MAX_TOKENS = 48, 8
NUM_REQUESTS, NUM_SMOKE_REQUESTS, NUM_WARM_UP = 250, 10, 5

Timed = tuple[float, float]
"""Seconds to the first token, and to the end."""


class Direct:
    """Calls workers as a router does; `prefill` is None for a combined worker."""

    def __init__(self, decode: Any, prefill: Any) -> None:
        self._decode, self._prefill = decode, prefill
        self._decode_incarnation = servers.describe(decode).incarnation
        self._prefill_incarnation = servers.describe(prefill).incarnation if prefill else ""
        self._num_calls = 0

    def __call__(self, token_ids: Sequence[int]) -> Timed:
        self._num_calls += 1
        common = {
            "request_id": f"direct-{self._num_calls}",
            "token_ids": token_ids,
            "sampling": inference_pb2.SamplingParams(
                temperature=0.0, top_p=1.0, max_tokens=MAX_TOKENS, ignore_eos=True, seed=1, n=1, best_of=1
            ),
            "rope_tier": 1.0,
            "timeout_s": servers.CALL_S,
        }
        request = worker_pb2.DecodeRequest(
            local_prefill=self._prefill is None, incarnation=self._decode_incarnation, **common
        )
        start_s, first_s = time.perf_counter(), 0.0
        reading = None
        for event in self._decode.Decode(request, timeout=servers.CALL_S):
            kind = event.WhichOneof("event")
            if kind == "admitted" and self._prefill is not None:
                ask = worker_pb2.PrefillRequest(
                    ticket=event.admitted.ticket, incarnation=self._prefill_incarnation, **common
                )
                reading = self._prefill.Prefill.future(ask, timeout=servers.CALL_S)
            elif kind == "delta" and not first_s:
                first_s = time.perf_counter()
        if reading is not None:
            reading.result()
        return first_s - start_s, time.perf_counter() - start_s


class Routed:
    """Calls the router."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __call__(self, token_ids: Sequence[int]) -> Timed:
        request = servers.generate_request(token_ids, MAX_TOKENS)
        start_s, first_s = time.perf_counter(), 0.0
        for response in self._stub.Generate(request, timeout=servers.CALL_S):
            if not first_s and response.WhichOneof("event") == "delta":
                first_s = time.perf_counter()
        return first_s - start_s, time.perf_counter() - start_s


def compare(name: str, direct: Direct, routed: Routed, num_requests: int) -> None:
    """Ask both in turns, one request at a time; a row for the first token and one for the whole reply."""
    drawn = random.Random(7)
    taken: dict[str, list[Timed]] = {"direct": [], "routed": []}
    for number in range(NUM_WARM_UP + num_requests):
        for way, ask in (("direct", direct), ("routed", routed)):
            timed = ask([drawn.randrange(3, 250) for _ in range(PROMPT_TOKENS)])
            if number >= NUM_WARM_UP:
                taken[way].append(timed)
    for index, part in enumerate(("first token", "whole reply")):
        ours, theirs = ([timed[index] for timed in taken[way]] for way in ("routed", "direct"))
        added_ms = {
            f"added_p{p}_ms": round((_percentile(ours, p) - _percentile(theirs, p)) * 1e3, 3)
            for p in (50, 99)
        }
        harness.report(
            "router",
            {
                "model": TINY_FOLDER.name,
                "workers": name,
                "part": part,
                "prompt_tokens": PROMPT_TOKENS,
                "max_tokens": MAX_TOKENS,
                "num_requests": num_requests,
            },
            harness.spread_of(ours),
            harness.spread_of(theirs),
            baseline_name="the workers called directly",
            unit="ms per request",
            scale=1e3,
            more=added_ms,
        )


def _percentile(samples: Sequence[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


def main() -> None:
    arguments = harness.arguments(__doc__ or "")
    num_requests = NUM_SMOKE_REQUESTS if arguments.smoke else NUM_REQUESTS
    with servers.Servers() as started:
        decode, prefill = started.start(
            servers.worker_command("decode", str(TINY_FOLDER)),
            servers.worker_command("prefill", str(TINY_FOLDER)),
        )
        pair, combined = started.start(
            servers.router_command(prefill=[prefill], decode=[decode]),
            servers.router_command(decode=[decode]),
        )
        decode_stub, prefill_stub = started.worker(decode), started.worker(prefill)
        compare(
            "one combined",
            Direct(decode_stub, None),
            Routed(started.inference(combined)),
            num_requests,
        )
        compare("1P1D", Direct(decode_stub, prefill_stub), Routed(started.inference(pair)), num_requests)


if __name__ == "__main__":
    main()
