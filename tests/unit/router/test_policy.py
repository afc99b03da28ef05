"""The choice of workers, from literal snapshots."""

from typing import Any

import pytest

from phasor.core.errors import CapacityError, WorkerLostError
from phasor.core.ids import Incarnation
from phasor.router.policy import Choice, Role, WorkerRef, WorkerSnapshot, choose


def worker(role: Role, port: int, **values: Any) -> WorkerSnapshot:
    ref = WorkerRef(role=role, address=f"127.0.0.1:{port}", incarnation=Incarnation(f"inc-{port}"))
    return WorkerSnapshot(ref=ref, **{"pool_tokens": 4096, "num_free_blocks": 256, **values})


def pick(
    *workers: WorkerSnapshot, prompt: int = 100, total: int = 200, local: int = 0, force: bool = False
) -> Choice:
    return choose(
        workers, prompt_tokens=prompt, total_tokens=total, local_prefill_tokens=local, force_local=force
    )


def ports(choice: Choice) -> tuple[int | None, int]:
    prefill = int(choice.prefill.address.split(":")[1]) if choice.prefill else None
    return prefill, int(choice.decode.address.split(":")[1])


def test_fewest_in_flight_wins_whatever_the_worker_says() -> None:
    choice = pick(
        worker("prefill", 1, in_flight=2),
        worker("prefill", 2, in_flight=1, num_running=9, num_waiting=9),
        worker("decode", 3, in_flight=0, num_running=5),
        worker("decode", 4, in_flight=1),
    )
    assert ports(choice) == (2, 3)
    assert not choice.why_local


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"num_waiting": 1}, {"num_waiting": 0, "num_running": 7}),
        ({"num_running": 2}, {"num_running": 1}),
        ({"num_free_blocks": 10}, {"num_free_blocks": 11}),
    ],
)
def test_the_workers_own_counts_break_ties(worse: dict[str, int], better: dict[str, int]) -> None:
    assert ports(pick(worker("decode", 1, **worse), worker("decode", 2, **better))) == (None, 2)


def test_a_full_tie_is_decided_the_same_way_every_time() -> None:
    assert ports(pick(worker("decode", 2), worker("decode", 1))) == (None, 1)


def test_unusable_workers_are_ignored() -> None:
    choice = pick(
        worker("prefill", 1, why_not="not ready"),
        worker("prefill", 2, in_flight=50),
        worker("decode", 3, why_not="silent"),
        worker("decode", 4, in_flight=50),
    )
    assert ports(choice) == (2, 4)


def test_decode_alone_without_a_prefill_worker() -> None:
    choice = pick(worker("decode", 1))
    assert ports(choice) == (None, 1) and not choice.is_fallback


@pytest.mark.parametrize(("prompt", "prefill"), [(31, None), (32, None), (33, 1)])
def test_short_prompts_are_read_by_the_decode_worker(prompt: int, prefill: int | None) -> None:
    assert ports(pick(worker("prefill", 1), worker("decode", 2), prompt=prompt, local=32)) == (prefill, 2)


def test_the_request_may_ask_for_local_prefill() -> None:
    choice = pick(worker("prefill", 1), worker("decode", 2), force=True)
    assert ports(choice) == (None, 2) and choice.why_local == "the request asks for it"


@pytest.mark.parametrize("values", [{"why_not": "silent"}, {"pool_tokens": 99}, {"max_model_len": 99}])
def test_no_usable_prefill_worker_is_a_visible_fallback(values: dict[str, Any]) -> None:
    """Case G12: never silent."""
    choice = pick(worker("prefill", 1, **values), worker("decode", 2))
    assert ports(choice) == (None, 2)
    assert choice.is_fallback and "127.0.0.1:1" in choice.why_local


def test_no_decode_worker_at_all() -> None:
    with pytest.raises(WorkerLostError, match="looked at 0: none is known"):
        pick(worker("prefill", 1))


def test_no_usable_decode_worker_says_what_was_looked_at() -> None:
    with pytest.raises(
        WorkerLostError, match=r"looked at 2: 127\.0\.0\.1:1 \(silent\), 127\.0\.0\.1:2 \(not ready\)"
    ):
        pick(worker("decode", 1, why_not="silent"), worker("decode", 2, why_not="not ready"))


def test_only_pools_that_can_hold_the_request_are_considered() -> None:
    small, large = worker("decode", 1, pool_tokens=199), worker("decode", 2, pool_tokens=200, in_flight=9)
    assert ports(pick(small, large, total=200)) == (None, 2)
    with pytest.raises(CapacityError, match=r"201 tokens .* holds 200") as caught:
        pick(small, large, total=201)
    assert caught.value.ever
