"""Each wrong field is refused by name, value and way out; each default is filled in."""

import math
from typing import Any

import pytest

from phasor.core.errors import CapacityError, InvalidRequestError, ModelNotFoundError
from phasor.core.request import SamplingParams
from phasor.router import validation
from phasor.router.validation import ModelLimits
from phasor.v1 import inference_pb2 as pb

LIMITS = ModelLimits(served_name="tiny", max_model_len=256, vocab_size=256, max_pool_tokens=1024)


def fill(prompt_tokens: int = 100, limits: ModelLimits = LIMITS, **fields: Any) -> SamplingParams:
    return validation.fill_sampling(
        pb.SamplingParams(**fields), prompt_tokens, limits, draw_seed=lambda: 4711
    )


def test_defaults() -> None:
    assert fill() == SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=4711, max_tokens=156)


def test_given_values_are_kept() -> None:
    given = fill(
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        seed=2**64 - 1,
        max_tokens=156,
        stop=["\n", "###"],
        stop_token_ids=[0, 255],
        ignore_eos=True,
    )
    assert given == SamplingParams(
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        seed=2**64 - 1,
        max_tokens=156,
        stop=("\n", "###"),
        stop_token_ids=(0, 255),
        ignore_eos=True,
    )


def test_a_seed_of_zero_is_a_seed() -> None:
    assert fill(seed=0).seed == 0


def test_max_tokens_defaults_to_what_fits_the_model_and_the_pool() -> None:
    assert (
        fill(
            limits=ModelLimits(served_name="", max_model_len=256, vocab_size=9, max_pool_tokens=160)
        ).max_tokens
        == 60
    )


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("sampling.temperature", {"temperature": -0.1}),
        ("sampling.temperature", {"temperature": math.nan}),
        ("sampling.temperature", {"temperature": math.inf}),
        ("sampling.top_p", {"top_p": 0.0}),
        ("sampling.top_p", {"top_p": 1.01}),
        ("sampling.top_p", {"top_p": -0.5}),
        ("sampling.top_p", {"top_p": math.nan}),
        ("sampling.top_k", {"top_k": -1}),
        ("sampling.max_tokens", {"max_tokens": 0}),
        ("sampling.max_tokens", {"max_tokens": -5}),
        ("sampling.max_tokens", {"max_tokens": 157}),
        ("sampling.stop[1]", {"stop": ["a", ""]}),
        ("sampling.stop[0]", {"stop": ["a" * 1025]}),
        ("sampling.stop", {"stop": ["a"] * 17}),
        ("sampling.stop_token_ids", {"stop_token_ids": [1] * 65}),
        ("sampling.stop_token_ids[1]", {"stop_token_ids": [1, 256]}),
        ("sampling.stop_token_ids[0]", {"stop_token_ids": [-1]}),
        ("sampling.min_p", {"min_p": -0.1}),
        ("sampling.min_p", {"min_p": math.nan}),
        ("sampling.presence_penalty", {"presence_penalty": 2.1}),
        ("sampling.frequency_penalty", {"frequency_penalty": -math.inf}),
        ("sampling.repetition_penalty", {"repetition_penalty": 1e-300}),
        ("sampling.repetition_penalty", {"repetition_penalty": 101.0}),
        ("sampling.logit_bias", {"logit_bias": {256: 0.0}}),
        ("sampling.logit_bias[7]", {"logit_bias": {7: math.nan}}),
        ("sampling.min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("sampling.logprobs", {"logprobs": 21}),
        ("sampling.prompt_logprobs", {"prompt_logprobs": -1}),
    ],
)
def test_wrong_sampling_parameters(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        fill(**fields)
    assert caught.value.field == field
    assert caught.value.hint and str(caught.value).startswith(f"{field}=")


def test_prompt_plus_max_tokens_names_what_fits() -> None:
    with pytest.raises(
        InvalidRequestError, match="prompt has 100 tokens and max_model_len is 256; at most 156 fit"
    ):
        fill(max_tokens=157)


def test_a_reply_that_no_pool_can_hold() -> None:
    small = ModelLimits(served_name="", max_model_len=256, vocab_size=256, max_pool_tokens=128)
    with pytest.raises(CapacityError, match="use at most 28") as caught:
        fill(limits=small, max_tokens=29)
    assert caught.value.ever
    assert fill(limits=small, max_tokens=28).max_tokens == 28


@pytest.mark.parametrize(
    ("num_choices", "prompt_tokens", "fits"),
    [
        (8, 16, True),
        (9, 16, False),
        (7, 17, True),
        (8, 17, True),
        (8, 33, False),
        (6, 33, True),
        (8, 128, True),
        (2, 143, False),
    ],
)
def test_so_many_replies_that_no_decode_worker_can_begin_them(
    num_choices: int, prompt_tokens: int, fits: bool
) -> None:
    """Nine blocks of 16 tokens; a partial block of the prompt is needed once per reply."""
    small = ModelLimits(
        served_name="", max_model_len=256, vocab_size=256, max_pool_tokens=144, max_running=8, block_tokens=16
    )
    message = pb.SamplingParams(max_tokens=1)

    def checked() -> int:
        return validation.fill_sampling(
            message, prompt_tokens, small, draw_seed=lambda: 1, num_choices=num_choices
        ).num_choices

    if fits:
        assert checked() == num_choices
        return
    with pytest.raises(CapacityError, match="ask for fewer") as caught:
        checked()
    assert caught.value.ever


def test_prompt_limits() -> None:
    validation.check_prompt(range(255), LIMITS, field="prompt")
    with pytest.raises(InvalidRequestError, match="is empty"):
        validation.check_prompt([], LIMITS, field="prompt")
    with pytest.raises(InvalidRequestError, match=r"has 256 tokens and max_model_len is 256.*at most 255"):
        validation.check_prompt(range(256), LIMITS, field="prompt")


def test_a_prompt_that_no_pool_can_hold() -> None:
    small = ModelLimits(served_name="", max_model_len=256, vocab_size=256, max_pool_tokens=128)
    validation.check_prompt(range(127), small, field="prompt")
    with pytest.raises(CapacityError, match="has 128 tokens") as caught:
        validation.check_prompt(range(128), small, field="prompt")
    assert caught.value.ever


def test_token_ids_outside_the_vocabulary() -> None:
    assert validation.check_token_ids([0, 255], 256, field="token_ids") == (0, 255)
    with pytest.raises(InvalidRequestError, match=r"token_ids\[2\]=256.*0 to 255"):
        validation.check_token_ids([0, 1, 256, 300], 256, field="token_ids")
    with pytest.raises(InvalidRequestError, match=r"token_ids\[0\]=-1"):
        validation.check_token_ids([-1], 256, field="token_ids")


def test_huge_text_is_refused_by_its_length() -> None:
    validation.check_text("a" * 65536, LIMITS, field="prompt")
    with pytest.raises(InvalidRequestError, match="65537 characters"):
        validation.check_text("a" * 65537, LIMITS, field="prompt")


def test_model_names() -> None:
    validation.check_model("", "tiny")
    validation.check_model("tiny", "tiny")
    with pytest.raises(ModelNotFoundError, match="'huge' is not served here; served: 'tiny'"):
        validation.check_model("huge", "tiny")


@pytest.mark.parametrize("text", ["a b", "ü", "a\n", "x" * 129, "a/b", 'a"'])
def test_wrong_request_ids(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="request_id"):
        validation.check_request_id(text)


def test_request_ids() -> None:
    assert validation.check_request_id("chat-1.2_3:4") == "chat-1.2_3:4"
    assert validation.check_request_id("x" * 128)
    assert validation.check_request_id("") != validation.check_request_id("")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 86401.0])
def test_wrong_timeouts(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        validation.check_timeout_s(value, 300.0)


def test_timeouts() -> None:
    assert validation.check_timeout_s(None, 300.0) == 300.0
    assert validation.check_timeout_s(0.5, 300.0) == 0.5


def test_messages() -> None:
    messages = [pb.ChatMessage(role="system", content="Be brief."), pb.ChatMessage(role="user", content="Hi")]
    assert validation.check_messages(messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    with pytest.raises(InvalidRequestError, match=r"messages=.*at least one"):
        validation.check_messages([])
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.role='usr': must be one of system"):
        validation.check_messages([pb.ChatMessage(role="usr", content="Hi")])
