"""Messages to Phasor's own types and back, one pair of functions per type."""

from collections.abc import Sequence
from typing import Any

from phasor.core.identity import Identity
from phasor.core.request import (
    ChoiceEnd,
    FinishReason,
    SampledToken,
    SamplingParams,
    Timing,
    TokenLogprobs,
    Usage,
)
from phasor.v1 import inference_pb2 as pb

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def finish_reason_to_pb(reason: FinishReason) -> pb.FinishReason:
    """Return the wire's value for `reason`."""
    return _REASONS[reason]


def finish_reason_from_pb(value: int) -> FinishReason:
    """Return the FinishReason for the wire's value; an unknown one is a peer's bug."""
    for reason, number in _REASONS.items():
        if number == value:
            return reason
    raise ValueError(f"unknown finish reason {value} on the wire")


_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "max_tokens",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "prompt_logprobs",
)
"""Optional on the wire, so that unset differs from 0."""


def sampling_to_pb(params: SamplingParams) -> pb.SamplingParams:
    """Return a message with every field set; `n` is the number of replies to make."""
    given = {name: getattr(params, name) for name in _SAMPLING_FIELDS}
    return pb.SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logit_bias=dict(params.logit_bias),
        min_tokens=params.min_tokens,
        n=params.num_choices,
    )


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Return parameters from a complete message (router to worker); unset fields take the defaults."""
    given: dict[str, Any] = {
        name: getattr(message, name) for name in _SAMPLING_FIELDS if message.HasField(name)
    }
    return SamplingParams(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        min_tokens=message.min_tokens,
        num_choices=message.n or 1,
    )


def logprobs_to_pb(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """Return the message for one token's log-probabilities."""
    top = [pb.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return pb.TokenLogprobs(logprob=logprobs.logprob, top=top)


def logprobs_from_pb(message: pb.TokenLogprobs) -> TokenLogprobs:
    """Return the TokenLogprobs of a message whose `logprob` is set."""
    return TokenLogprobs(message.logprob, tuple((top.token_id, top.logprob) for top in message.top))


def sampled_from_pb(
    token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]
) -> tuple[SampledToken, ...]:
    """Return tokens with their log-probabilities, of which there are either none or one per token.

    Raises:
        ValueError: there are some, but not one per token.
    """
    if not logprobs:
        return tuple(SampledToken(token) for token in token_ids)
    return tuple(
        SampledToken(token, logprobs_from_pb(one)) for token, one in zip(token_ids, logprobs, strict=True)
    )


def choice_end_to_pb(end: ChoiceEnd) -> pb.ChoiceEnd:
    """Return the message for one reply's end."""
    return pb.ChoiceEnd(
        index=end.index,
        finish_reason=finish_reason_to_pb(end.reason),
        stop_string=end.stop_string,
        completion_tokens=end.completion_tokens,
    )


def choice_end_from_pb(message: pb.ChoiceEnd) -> ChoiceEnd:
    """Return the ChoiceEnd of a message."""
    return ChoiceEnd(
        index=message.index,
        reason=finish_reason_from_pb(message.finish_reason),
        stop_string=message.stop_string,
        completion_tokens=message.completion_tokens,
    )


def usage_to_pb(usage: Usage) -> pb.Usage:
    """Return the message for `usage`."""
    return pb.Usage(**{name: getattr(usage, name) for name in Usage.__slots__})


def usage_from_pb(message: pb.Usage) -> Usage:
    """Return the Usage of a message."""
    return Usage(**{name: getattr(message, name) for name in Usage.__slots__})


def timing_to_pb(timing: Timing) -> pb.Timing:
    """Return the message for `timing`."""
    return pb.Timing(**{name: getattr(timing, name) for name in Timing.__slots__})


def timing_from_pb(message: pb.Timing) -> Timing:
    """Return the Timing of a message."""
    return Timing(**{name: getattr(message, name) for name in Timing.__slots__})


def identity_to_pb(identity: Identity) -> pb.Identity:
    """Return the message for `identity`."""
    return pb.Identity(**{name: getattr(identity, name) for name in Identity.__slots__})


def identity_from_pb(message: pb.Identity) -> Identity:
    """Return the Identity of a message."""
    values: dict[str, Any] = {name: getattr(message, name) for name in Identity.__slots__}
    values["layers"] = tuple(values["layers"])
    return Identity(**values)
