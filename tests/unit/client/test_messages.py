"""Requests from arguments, data from responses: no network."""

import grpc
import pytest

from phasor.client import messages as wire
from phasor.client.types import Delta, Message, Role
from phasor.core.errors import DeadlineExceededError, InternalError, InvalidRequestError, WorkerLostError
from phasor.core.request import FinishReason
from phasor.v1 import inference_pb2 as pb

COMMON = {"model": "", "timeout_s": 5.0, "request_id": ""}


def test_every_argument_reaches_its_field() -> None:
    request = wire.generate_request(
        "hello",
        None,
        model="m",
        timeout_s=2.5,
        request_id="r",
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        seed=2**64 - 1,
        max_tokens=7,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
    )
    assert request == pb.GenerateRequest(
        model="m",
        prompt="hello",
        timeout_s=2.5,
        request_id="r",
        sampling=pb.SamplingParams(
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            seed=2**64 - 1,
            max_tokens=7,
            stop=["a", "b"],
            stop_token_ids=[1, 2],
            ignore_eos=True,
        ),
    )


def test_what_is_left_out_stays_unset_and_zero_does_not() -> None:
    unset = wire.generate_request("x", None, **COMMON, temperature=None, seed=None).sampling
    assert (
        not unset.HasField("temperature") and not unset.HasField("seed") and not unset.HasField("max_tokens")
    )
    zero = wire.generate_request("x", None, **COMMON, temperature=0.0, seed=0).sampling
    assert zero.HasField("temperature") and zero.HasField("seed")


def test_one_stop_string_is_one_stop_string() -> None:
    assert list(wire.generate_request("x", None, **COMMON, stop="END").sampling.stop) == ["END"]


def test_an_empty_prompt_is_sent_so_that_the_server_can_refuse_it() -> None:
    assert wire.generate_request("", None, **COMMON).WhichOneof("input") == "prompt"
    assert wire.generate_request(None, [], **COMMON).WhichOneof("input") == "token_ids"


@pytest.mark.parametrize(
    ("prompt", "ids", "sampling", "field"),
    [
        (None, None, {}, "prompt"),
        ("x", [1], {}, "prompt"),
        (None, [1, 2**31], {}, "token_ids"),
        (None, [1.5], {}, "token_ids"),
        ("\ud800", None, {}, "prompt"),
        ("x", None, {"seed": -1}, "seed"),
        ("x", None, {"max_tokens": 2.5}, "max_tokens"),
        ("x", None, {"max_tokens": "many"}, "max_tokens"),
        ("x", None, {"stop_token_ids": [2**40]}, "stop_token_ids"),
        ("x", None, {"stop": [3]}, "stop"),
    ],
)
def test_what_does_not_fit_the_wire_is_refused_by_field(prompt, ids, sampling, field) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        wire.generate_request(prompt, ids, **COMMON, **sampling)
    assert caught.value.field == field


def test_a_misspelt_option_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        wire.generate_request("x", None, **COMMON, temprature=1.0)  # type: ignore[call-arg]


def test_messages_are_dataclasses_or_mappings() -> None:
    request = wire.chat_request([Message("system", "s"), {"role": "user", "content": "u"}], **COMMON)
    assert [(m.role, m.content) for m in request.messages] == [("system", "s"), ("user", "u")]


@pytest.mark.parametrize("bad", [{"role": "user"}, {"role": "user", "content": "x", "name": "y"}, "hi"])
def test_other_messages_are_refused_by_index(bad) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        wire.chat_request([Message("user", "ok"), bad], **COMMON)
    assert caught.value.field == "messages[1]"


@pytest.mark.parametrize("content", [None, 3])
def test_a_content_that_is_no_text_is_refused(content) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        wire.chat_request([{"role": "user", "content": content}], **COMMON)
    assert caught.value.field == "messages[0].content"


def test_tokenize_takes_text_or_messages() -> None:
    assert wire.tokenize_request("x", None, model="").text == "x"
    assert wire.tokenize_request(None, [], model="").WhichOneof("input") == "messages"
    with pytest.raises(InvalidRequestError):
        wire.tokenize_request(None, None, model="")


def test_our_clock_gives_up_after_the_servers() -> None:
    assert wire.rpc_timeout_s(5.0) > 5.0
    # For these the server has a better message than an instant "deadline exceeded".
    for value in (0.0, -1.0, float("nan"), float("inf")):
        assert wire.rpc_timeout_s(value) is None


def test_a_reply_is_put_together_from_its_events() -> None:
    state = wire.ReplyState()
    for text, ids in (("Par", [1]), ("", [2]), ("is", [3, 4])):
        event = state.feed(pb.GenerateResponse(request_id="r", delta=pb.Delta(text=text, token_ids=ids)))
        assert event == Delta(text=text, token_ids=tuple(ids))
    with pytest.raises(InternalError, match="closed before its end"):
        state.completion()
    with pytest.raises(InternalError, match="without its last message"):
        state.check_end()
    end = pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(completion_tokens=4))
    state.feed(pb.GenerateResponse(finished=end))
    whole = state.completion()
    assert (whole.request_id, whole.text, whole.token_ids) == ("r", "Paris", (1, 2, 3, 4))
    assert whole.finished.finish_reason is FinishReason.LENGTH
    assert whole.finished.usage.completion_tokens == 4


@pytest.mark.parametrize(
    "response",
    [pb.GenerateResponse(request_id="r"), pb.GenerateResponse(finished=pb.Finished(finish_reason=0))],
)
def test_what_this_client_does_not_know_is_an_error_not_a_silent_skip(response) -> None:
    with pytest.raises(InternalError, match="unknown"):
        wire.ReplyState().feed(response)


def test_a_worker_role_from_the_future_is_unknown() -> None:
    response = pb.GetServerInfoResponse(workers=[pb.WorkerSummary(role=7)])  # type: ignore[arg-type]
    assert wire.server_info(response).workers[0].role is Role.UNKNOWN


class _Failed(grpc.RpcError):
    def __init__(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


def test_no_server_says_how_to_start_one() -> None:
    error = wire.error_from_call(_Failed(grpc.StatusCode.UNAVAILABLE, "refused\nby host"), "h:1")
    assert isinstance(error, WorkerLostError)
    assert "h:1" in str(error) and "phasor serve" in str(error) and "\n" not in str(error)


def test_a_worker_that_the_server_lost_is_told_as_the_server_tells_it() -> None:
    metadata = (("phasor-error", '{"type": "WorkerLostError", "fields": {}}'),)
    error = wire.error_from_call(_Failed(grpc.StatusCode.UNAVAILABLE, "decode worker died", metadata), "h:1")
    assert isinstance(error, WorkerLostError) and str(error) == "decode worker died"


def test_our_own_deadline_names_the_server() -> None:
    error = wire.error_from_call(_Failed(grpc.StatusCode.DEADLINE_EXCEEDED, ""), "h:1")
    assert isinstance(error, DeadlineExceededError) and "h:1" in str(error)
