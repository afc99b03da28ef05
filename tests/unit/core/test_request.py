"""Request data: defaults that mean what the wire says, and frozen sampling parameters."""

from dataclasses import FrozenInstanceError

import pytest

from phasor.core.ids import new_incarnation, new_request_id, new_ticket_id
from phasor.core.request import FinishedReply, FinishReason, SamplingParams, Timing, Usage


def test_defaults_are_those_of_the_wire() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 0, 1.0)
    assert not params.greedy
    assert not params.ignore_eos


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=1e-9).greedy, "dividing by it would overflow float32"
    assert not SamplingParams(temperature=1e-3).greedy


def test_sampling_parameters_are_frozen_and_hashable() -> None:
    params = SamplingParams(stop=("a",))
    with pytest.raises(FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]
    assert len({params, SamplingParams(stop=("a",))}) == 1


def test_replies_do_not_share_usage() -> None:
    first, second = FinishedReply(choices=()), FinishedReply(choices=())
    first.usage.prompt_tokens = 3
    assert second.usage == Usage()
    assert second.timing == Timing()


def test_finish_reasons_read_as_the_text_that_clients_know() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length"]


@pytest.mark.parametrize(
    ("draw", "prefix"), [(new_request_id, "req-"), (new_ticket_id, "tkt-"), (new_incarnation, "inc-")]
)
def test_ids_say_what_they_are_and_do_not_repeat(draw: object, prefix: str) -> None:
    assert callable(draw)
    drawn = [draw() for _ in range(1000)]
    assert len(set(drawn)) == 1000
    assert all(item.startswith(prefix) and len(item) == 20 for item in drawn)
