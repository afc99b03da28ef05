"""Conversion: whatever goes into a message comes out of it equal, and unset fields take the defaults."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor.core.identity import Identity
from phasor.core.request import FinishReason, SamplingParams, Timing, TokenLogprobs, Usage
from phasor.v1 import inference_pb2 as pb
from phasor.wire import convert

INT32 = st.integers(0, 2**31 - 1)
# protobuf text is UTF-8, which has no lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FLOAT = st.floats(allow_nan=False)

SAMPLING = st.builds(
    SamplingParams,
    temperature=FLOAT,
    top_k=INT32,
    top_p=FLOAT,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=INT32,
    stop=st.lists(TEXT, max_size=4).map(tuple),
    stop_token_ids=st.lists(INT32, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    min_p=FLOAT,
    presence_penalty=FLOAT,
    frequency_penalty=FLOAT,
    repetition_penalty=FLOAT,
    logit_bias=st.dictionaries(INT32, FLOAT, max_size=4).map(lambda bias: tuple(sorted(bias.items()))),
    min_tokens=INT32,
    logprobs=st.none() | INT32,
    prompt_logprobs=st.none() | INT32,
    num_choices=st.integers(1, 64),
)
LOGPROBS = st.builds(TokenLogprobs, FLOAT, st.lists(st.tuples(INT32, FLOAT), max_size=3).map(tuple))
USAGE = st.builds(
    Usage,
    prompt_tokens=INT32,
    completion_tokens=INT32,
    cached_tokens=INT32,
    prefill_computed_tokens=INT32,
    decode_computed_tokens=INT32,
    transferred_tokens=INT32,
    transferred_bytes=st.integers(0, 2**63 - 1),
    num_preemptions=INT32,
)
TIMING = st.builds(
    Timing, queue_s=FLOAT, prefill_s=FLOAT, transfer_s=FLOAT, first_token_s=FLOAT, total_s=FLOAT
)
IDENTITY = st.builds(
    Identity,
    weights_digest=TEXT,
    adapter_digest=TEXT,
    k_dtype=TEXT,
    v_dtype=TEXT,
    layers=st.lists(INT32, max_size=6).map(tuple),
    num_kv_heads=INT32,
    k_dim=INT32,
    v_dim=INT32,
    block_tokens=INT32,
    retention=TEXT,
    rope_fingerprint=TEXT,
    tier=FLOAT,
    position_basis=TEXT,
    numerics_version=INT32,
    tenant_salt=TEXT,
)


@given(SAMPLING)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    message = pb.SamplingParams.FromString(convert.sampling_to_pb(params).SerializeToString())
    assert convert.sampling_from_pb(message) == params


@given(LOGPROBS)
def test_log_probabilities_survive_the_wire(logprobs: TokenLogprobs) -> None:
    message = pb.TokenLogprobs.FromString(convert.logprobs_to_pb(logprobs).SerializeToString())
    assert convert.logprobs_from_pb(message) == logprobs


def test_log_probabilities_for_some_tokens_only_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        convert.sampled_from_pb([1, 2], [pb.TokenLogprobs(logprob=-1.0)])


@given(USAGE)
def test_usage_survives_the_wire(usage: Usage) -> None:
    assert convert.usage_from_pb(pb.Usage.FromString(convert.usage_to_pb(usage).SerializeToString())) == usage


@given(TIMING)
def test_timing_survives_the_wire(timing: Timing) -> None:
    message = pb.Timing.FromString(convert.timing_to_pb(timing).SerializeToString())
    assert convert.timing_from_pb(message) == timing


@given(IDENTITY)
def test_an_identity_survives_the_wire_with_its_namespace(identity: Identity) -> None:
    message = pb.Identity.FromString(convert.identity_to_pb(identity).SerializeToString())
    again = convert.identity_from_pb(message)
    assert again.first_difference(identity) is None
    assert again.namespace() == identity.namespace()


@pytest.mark.parametrize("reason", list(FinishReason))
def test_a_finish_reason_survives_the_wire(reason: FinishReason) -> None:
    assert convert.finish_reason_from_pb(convert.finish_reason_to_pb(reason)) is reason


@pytest.mark.parametrize("value", [pb.FINISH_REASON_UNSPECIFIED, 99])
def test_an_unknown_finish_reason_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"unknown finish reason {value}"):
        convert.finish_reason_from_pb(value)


def test_unset_fields_take_the_defaults() -> None:
    assert convert.sampling_from_pb(pb.SamplingParams()) == SamplingParams()


def test_a_zero_that_was_set_is_not_taken_for_unset() -> None:
    params = convert.sampling_from_pb(pb.SamplingParams(temperature=0.0, top_p=0.0, max_tokens=0))
    assert (params.temperature, params.top_p, params.max_tokens) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (SamplingParams, pb.SamplingParams),
        (Usage, pb.Usage),
        (Timing, pb.Timing),
        (Identity, pb.Identity),
    ],
)
def test_message_and_type_have_the_same_fields(cls: type, message: type[pb.Usage]) -> None:
    # A field added to one of the two and forgotten in the other would be dropped on the way.
    ours, wires = {field.name for field in fields(cls)}, set(message.DESCRIPTOR.fields_by_name)
    if cls is SamplingParams:
        # `n` is the number of replies to make; what of them a client is shown stays at the router.
        ours, wires = ours - {"num_choices"}, wires - {"n", "best_of", "echo"}
    assert ours == wires
