"""Requests from arguments, data from responses, errors from statuses: all that `Client` and `AsyncClient` share.

Checks only what the wire cannot carry (a string for a number, an id beyond 32 bits); the server validates the rest,
because only it knows the model's limits.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import grpc

from phasor.client.types import (
    Choice,
    Completion,
    Counts,
    Delta,
    Event,
    Finished,
    Message,
    ModelCard,
    Prompt,
    Role,
    Rope,
    ServerInfo,
    Worker,
)
from phasor.core.errors import InternalError, InvalidRequestError, PhasorError, WorkerLostError
from phasor.core.request import ChoiceEnd
from phasor.v1 import inference_pb2 as pb
from phasor.wire.convert import (
    choice_end_from_pb,
    finish_reason_from_pb,
    identity_from_pb,
    logprobs_from_pb,
    timing_from_pb,
    usage_from_pb,
)
from phasor.wire.status import ERROR_METADATA_KEY, error_from_status

DEFAULT_TIMEOUT_S = 300.0
"""Deadline of a whole reply if none is given."""
UNARY_TIMEOUT_S = 10.0
"""Deadline of a call that answers at once."""
_SERVER_FIRST_S = 2.0
"""Our own clock gives up this much later than the server's, whose message says more."""

T = TypeVar("T")


class SamplingOptions(TypedDict, total=False):
    """How to choose tokens and when to stop; what is left out (or None) takes the server's default."""

    temperature: float | None
    """0 always takes the likeliest token. Default 1."""
    top_k: int | None
    """Keep the k likeliest tokens; 0 (default) keeps all."""
    top_p: float | None
    """Keep the smallest set of tokens whose probability reaches top_p. Default 1."""
    seed: int | None
    """The same seed gives the same reply. Default: drawn."""
    max_tokens: int | None
    """At most this many new tokens. Default: as many as fit."""
    stop: str | Sequence[str] | None
    """Strings that end the reply; never part of it."""
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    """Go on after the end-of-sequence token."""
    min_p: float | None
    """Drop tokens less likely than this share of the likeliest one. Default 0."""
    presence_penalty: float | None
    """Taken off the logit of every token that the reply contains; -2 to 2. Default 0."""
    frequency_penalty: float | None
    """Taken off as often as the reply contains the token; -2 to 2. Default 0."""
    repetition_penalty: float | None
    """Divides the logits of tokens that prompt or reply contain. Default 1."""
    logit_bias: Mapping[int, float] | None
    """Token id to what is added to its logit; -100 to 100."""
    min_tokens: int | None
    """Nothing but max_tokens ends the reply before it has that many tokens."""
    logprobs: int | None
    """Each token's log-probability, and those of so many likeliest ones (0 to 20). Default: none."""
    prompt_logprobs: int | None
    """The same for the prompt's tokens."""
    echo: bool | None
    """`generate` only: the prompt comes first, as a Prompt event."""
    n: int | None
    """Replies to the one prompt. Default 1."""
    best_of: int | None
    """Make this many replies and return the n of highest mean log-probability. Default n."""


MessageLike = Message | Mapping[str, str]


def generate_request(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    *,
    model: str,
    timeout_s: float,
    request_id: str,
    **sampling: Unpack[SamplingOptions],
) -> pb.GenerateRequest:
    """Build a GenerateRequest.

    Raises:
        InvalidRequestError: neither or both inputs are given, or a value does not fit its field.
    """
    _exactly_one("prompt", prompt, "token_ids", token_ids)
    request = pb.GenerateRequest()
    _set(request, "model", model)
    _set(request, "request_id", request_id)
    _set(request, "timeout_s", timeout_s)
    if prompt is not None:
        _set(request, "prompt", prompt)
    else:
        request.token_ids.SetInParent()
        _set(request.token_ids, "ids", token_ids, name="token_ids")
    _set_sampling(request.sampling, sampling)
    return request


def chat_request(
    messages: Sequence[MessageLike],
    *,
    model: str,
    timeout_s: float,
    request_id: str,
    **sampling: Unpack[SamplingOptions],
) -> pb.ChatRequest:
    """Build a ChatRequest; raises InvalidRequestError as `generate_request`."""
    request = pb.ChatRequest()
    _set(request, "model", model)
    _set(request, "request_id", request_id)
    _set(request, "timeout_s", timeout_s)
    _add_messages(request.messages, messages)
    _set_sampling(request.sampling, sampling)
    return request


def tokenize_request(
    text: str | None, messages: Sequence[MessageLike] | None, *, model: str
) -> pb.TokenizeRequest:
    """Build a TokenizeRequest; raises InvalidRequestError as `generate_request`."""
    _exactly_one("text", text, "messages", messages)
    request = pb.TokenizeRequest()
    _set(request, "model", model)
    if messages is None:
        _set(request, "text", text)
    else:
        request.messages.SetInParent()
        _add_messages(request.messages.messages, messages)
    return request


def detokenize_request(token_ids: Sequence[int], *, model: str) -> pb.DetokenizeRequest:
    """Build a DetokenizeRequest; raises InvalidRequestError as `generate_request`."""
    request = pb.DetokenizeRequest()
    _set(request, "model", model)
    _set(request, "token_ids", token_ids)
    return request


def rpc_timeout_s(timeout_s: float) -> float | None:
    """Return gRPC's deadline for a reply that may take `timeout_s`; None where the server must refuse the value."""
    return timeout_s + _SERVER_FIRST_S if math.isfinite(timeout_s) and timeout_s > 0 else None


class ReplyState:
    """What has arrived of one reply; the half of a reply that does not care how it is read."""

    def __init__(self) -> None:
        self.request_id = ""
        self.finished: Finished | None = None
        self.prompt: Prompt | None = None
        self._deltas: dict[int, list[Delta]] = {}

    @property
    def text(self) -> str:
        """The text so far (of the first reply, if there are several)."""
        return "".join(delta.text for delta in self._deltas.get(0, ()))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids so far (of the first reply, if there are several)."""
        return tuple(token for delta in self._deltas.get(0, ()) for token in delta.token_ids)

    def feed(self, response: pb.GenerateResponse) -> Event:
        """Take one message of the stream in; return it as an event.

        Raises:
            InternalError: the server does not keep to the protocol.
        """
        self.request_id = response.request_id or self.request_id
        if self.finished is not None:
            raise InternalError(f"request {self.request_id}: the server went on after the end of the reply")
        kind = response.WhichOneof("event")
        if kind == "delta":
            delta = _delta(response.delta)
            self._deltas.setdefault(delta.index, []).append(delta)
            return delta
        if kind == "prompt":
            self.prompt = _prompt(response.prompt)
            return self.prompt
        if kind == "finished":
            self.finished = _finished(response.finished)
            return self.finished
        raise InternalError(f"request {self.request_id}: the server sent an event unknown to this client")

    def check_end(self) -> None:
        """Accept that the stream ended; a stream without Finished is a truncated reply, never an answer."""
        if self.finished is None:
            raise InternalError(f"request {self.request_id}: the reply ended without its last message")

    def completion(self) -> Completion:
        """Return the whole reply.

        Raises:
            InternalError: it was closed, or failed, before its end.
        """
        if self.finished is None:
            raise InternalError(f"request {self.request_id}: the reply was closed before its end")
        return Completion(
            request_id=self.request_id,
            text=self.text,
            token_ids=self.token_ids,
            finished=self.finished,
            choices=tuple(_choice(end, self._deltas.get(end.index, ())) for end in self.finished.choices),
            prompt=self.prompt,
        )


def model_cards(response: pb.ListModelsResponse) -> list[ModelCard]:
    """Return the models of a response."""
    return [_copy(ModelCard, card) for card in response.models]


def server_info(response: pb.GetServerInfoResponse) -> ServerInfo:
    """Return the server's account of itself."""
    return ServerInfo(
        version=response.version,
        model=_copy(ModelCard, response.model),
        identity=identity_from_pb(response.identity),
        rope=_copy(Rope, response.rope),
        workers=tuple(
            Worker(
                role=_ROLES.get(worker.role, Role.UNKNOWN),
                address=worker.address,
                incarnation=worker.incarnation,
                healthy=worker.healthy,
                counts=_copy(Counts, worker.counts),
                metrics_address=worker.metrics_address,
            )
            for worker in response.workers
        ),
        metrics_address=response.metrics_address,
    )


def error_from_call(exc: grpc.RpcError, address: str) -> PhasorError:
    """Return the PhasorError of a failed call to the server at `address`."""
    call: Any = exc
    trailing = [key for key, _ in call.trailing_metadata() or ()]
    if call.code() is grpc.StatusCode.UNAVAILABLE and ERROR_METADATA_KEY not in trailing:
        details = " ".join((call.details() or "").split())
        return WorkerLostError(
            f"no Phasor server answers at {address} ({details}); start one with `phasor serve`, "
            "or name where it listens"
        )
    return error_from_status(exc, peer=f"the server at {address}")


_ROLES = {pb.WORKER_ROLE_PREFILL: Role.PREFILL, pb.WORKER_ROLE_DECODE: Role.DECODE}


def _delta(message: pb.Delta) -> Delta:
    return Delta(
        text=message.text,
        token_ids=tuple(message.token_ids),
        index=message.index,
        logprobs=tuple(map(logprobs_from_pb, message.logprobs)),
    )


def _prompt(message: pb.Prompt) -> Prompt:
    return Prompt(
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(
            logprobs_from_pb(one) if one.HasField("logprob") else None for one in message.logprobs
        ),
    )


def _choice(end: ChoiceEnd, deltas: Sequence[Delta]) -> Choice:
    return Choice(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(one for delta in deltas for one in delta.logprobs),
        end=end,
    )


def _finished(message: pb.Finished) -> Finished:
    try:
        reason = finish_reason_from_pb(message.finish_reason)
        choices = tuple(map(choice_end_from_pb, message.choices))
    except ValueError as exc:
        raise InternalError(f"the server sent a message unknown to this client: {exc}") from exc
    return Finished(
        finish_reason=reason,
        stop_string=message.stop_string,
        usage=usage_from_pb(message.usage),
        timing=timing_from_pb(message.timing),
        rope_tier=message.rope_tier,
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
        choices=choices,
    )


def _copy(cls: type[T], message: Any) -> T:
    """Copy equally named fields of a message into a dataclass."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: getattr(message, name) for name in names})


def _exactly_one(first: str, a: object, second: str, b: object) -> None:
    if (a is None) == (b is None):
        raise InvalidRequestError(first, a, f"give either {first} or {second}")


def _set_sampling(message: pb.SamplingParams, sampling: Mapping[str, Any]) -> None:
    known = SamplingOptions.__annotations__
    for name, value in sampling.items():
        if name not in known:
            raise TypeError(f"unknown sampling option {name!r}; known: {', '.join(known)}")
        if value is not None:
            _set(message, name, (value,) if name == "stop" and isinstance(value, str) else value)


def _add_messages(target: Any, messages: Sequence[MessageLike]) -> None:
    for index, given in enumerate(messages):
        name = f"messages[{index}]"
        entry = dataclasses.asdict(given) if isinstance(given, Message) else given
        if not isinstance(entry, Mapping) or set(entry) != {"role", "content"}:
            raise InvalidRequestError(name, given, "a message has a role and a content, both text")
        message = target.add()
        for key in ("role", "content"):
            _set(message, key, entry[key], name=f"{name}.{key}")


def _set(message: Any, field: str, value: Any, *, name: str = "") -> None:
    """Set a field, singular or repeated, naming it if the value does not fit."""
    try:
        if isinstance(value, list | tuple):
            getattr(message, field).extend(value)
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                getattr(message, field)[key] = entry
        elif isinstance(value, str | int | float):
            setattr(message, field, value)
        else:  # any other sequence: an array of ids
            getattr(message, field).extend(list(value))
    except (TypeError, ValueError, AttributeError) as exc:
        raise InvalidRequestError(name or field, value, f"does not fit the field: {exc}") from exc
