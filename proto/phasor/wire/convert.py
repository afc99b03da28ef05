"""Messages to Phasor's own types and back, one pair of functions per type."""

from typing import Any

from phasor.core.identity import Identity
from phasor.core.request import FinishReason, SamplingParams, Timing, Usage
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


def sampling_to_pb(params: SamplingParams) -> pb.SamplingParams:
    """Return a message with every field set."""
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Return parameters from a complete message (router to worker); unset fields take the defaults."""
    given: dict[str, Any] = {
        name: getattr(message, name)
        for name in ("temperature", "top_k", "top_p", "seed", "max_tokens")
        if message.HasField(name)
    }
    return SamplingParams(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
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
