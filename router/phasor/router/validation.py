"""Every field of a client's request, checked against what the served model and the fleet can do.

Pure. A refusal names the field, its value and the way out. It deliberately does not choose workers.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phasor.core.errors import CapacityError, InvalidRequestError, ModelNotFoundError
from phasor.core.ids import RequestId, new_request_id
from phasor.core.request import SamplingParams
from phasor.v1 import inference_pb2 as pb

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_TIMEOUT_S = 86400.0
MAX_CHARACTERS_PER_TOKEN = 256
"""A text with more characters than this times max_model_len is refused before it is tokenised. Generous:
natural text has 2 to 5, and the longest runs of blanks in known vocabularies have 128."""
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
"""Beyond it, and below its inverse, logits may leave float32's range."""
MAX_CHOICES = 64
ROLES = ("system", "developer", "user", "assistant", "tool")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What bounds a request."""

    served_name: str
    max_model_len: int
    """Prompt plus reply, in tokens."""
    vocab_size: int
    """Token ids are 0 .. vocab_size - 1."""
    max_pool_tokens: int
    """Tokens that the largest KV pool among usable decode workers holds."""
    max_running: int = MAX_CHOICES
    """Replies that a decode worker can write together: the most among usable ones."""
    block_tokens: int = 1
    """Tokens per block of those pools."""


def check_model(name: str, served_name: str) -> None:
    """Refuse a model that is not served; an empty name means the served one.

    Raises:
        ModelNotFoundError: naming both.
    """
    if name and name != served_name:
        raise ModelNotFoundError(name, served_name)


def check_request_id(text: str) -> RequestId:
    """Return the client's request id, or a drawn one for an empty text.

    Raises:
        InvalidRequestError: a character or the length is not allowed.
    """
    if not text:
        return new_request_id()
    if _REQUEST_ID.fullmatch(text) is None:
        hint = "use 1 to 128 of A-Z a-z 0-9 . _ : -, or leave it empty to have one drawn"
        raise InvalidRequestError("request_id", text, hint)
    return RequestId(text)


def check_timeout_s(value: float | None, default_s: float) -> float:
    """Return the request's time limit in seconds.

    Raises:
        InvalidRequestError: not a positive, finite number of at most a day.
    """
    if value is None:
        return default_s
    if not (math.isfinite(value) and 0 < value <= MAX_TIMEOUT_S):
        hint = f"must be > 0 and <= {MAX_TIMEOUT_S:.0f}, or left out for {default_s:g}"
        raise InvalidRequestError("timeout_s", value, hint)
    return value


def check_messages(messages: Sequence[pb.ChatMessage]) -> list[dict[str, str]]:
    """Return messages as chat templates take them.

    Raises:
        InvalidRequestError: there is none, or a role is unknown.
    """
    if not messages:
        raise InvalidRequestError("messages", [], "is empty; give at least one message with role 'user'")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            hint = f"must be one of {', '.join(ROLES)}"
            raise InvalidRequestError(f"messages[{index}].role", message.role, hint)
    return [{"role": message.role, "content": message.content} for message in messages]


def check_text(text: str, limits: ModelLimits, *, field: str) -> None:
    """Refuse a text that is certainly too long, without the minutes that tokenising it would take.

    Raises:
        InvalidRequestError: with the number of characters.
    """
    bound = limits.max_model_len * MAX_CHARACTERS_PER_TOKEN
    if len(text) > bound:
        hint = f"has {len(text)} characters; max_model_len is {limits.max_model_len} tokens, shorten it"
        raise InvalidRequestError(field, text[:40], hint)


def check_token_ids(ids: Sequence[int], vocab_size: int, *, field: str) -> tuple[int, ...]:
    """Return the ids as a tuple.

    Raises:
        InvalidRequestError: one is outside the vocabulary; names the first.
    """
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        hint = f"is outside the vocabulary; token ids are 0 to {vocab_size - 1}"
        raise InvalidRequestError(f"{field}[{index}]", wrong, hint)
    return tuple(ids)


def check_prompt(token_ids: Sequence[int], limits: ModelLimits, *, field: str) -> None:
    """Refuse an empty prompt, and one that leaves no room for a reply of one token.

    Raises:
        InvalidRequestError: empty, or longer than the model's limit.
        CapacityError: longer than any decode worker's whole pool (`ever` is set).
    """
    num_tokens = len(token_ids)
    if num_tokens == 0:
        raise InvalidRequestError(field, "", "the prompt is empty; give at least one token")
    if num_tokens >= limits.max_model_len:
        hint = (
            f"the prompt has {num_tokens} tokens and max_model_len is {limits.max_model_len}, which "
            f"includes at least one token of reply; send at most {limits.max_model_len - 1}"
        )
        raise InvalidRequestError(field, f"{num_tokens} tokens", hint)
    if num_tokens >= limits.max_pool_tokens:
        raise CapacityError(
            f"the prompt has {num_tokens} tokens and the largest KV pool of a decode worker holds "
            f"{limits.max_pool_tokens}, reply included; shorten it or raise --kv-memory",
            ever=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """What of the workers' tokens the client is shown."""

    num_returned: int = 1
    """The best so many of the replies that are made."""
    echo: bool = False
    """The prompt's text comes first."""
    prompt_logprobs: bool = False
    logprobs: bool = False
    """Asked for by the client, not only needed to choose the best."""


def check_shape(message: pb.SamplingParams, *, can_echo: bool) -> tuple[ReplyShape, int]:
    """Return what the client is shown, and how many replies must be made for it.

    Args:
        message: what the client sent.
        can_echo: whether the prompt is the client's own text.

    Raises:
        InvalidRequestError: naming field, value and what would work.
    """
    n = message.n if message.HasField("n") else 1
    best_of = message.best_of if message.HasField("best_of") else n
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequestError("sampling.n", n, f"must be 1 to {MAX_CHOICES}")
    if not n <= best_of <= MAX_CHOICES:
        hint = f"must be at least n ({n}) and at most {MAX_CHOICES}, or left out"
        raise InvalidRequestError("sampling.best_of", best_of, hint)
    if message.echo and not can_echo:
        hint = "is for Generate: a chat's prompt is laid out by the model's template; use Generate, or leave it out"
        raise InvalidRequestError("sampling.echo", True, hint)
    shape = ReplyShape(
        num_returned=n,
        echo=message.echo,
        prompt_logprobs=message.HasField("prompt_logprobs")
        or (message.echo and message.HasField("logprobs")),
        logprobs=message.HasField("logprobs"),
    )
    return shape, best_of


def fill_sampling(
    message: pb.SamplingParams,
    prompt_tokens: int,
    limits: ModelLimits,
    *,
    draw_seed: Callable[[], int],
    num_choices: int = 1,
    num_returned: int = 1,
) -> SamplingParams:
    """Return complete parameters: every field checked, defaults filled in.

    Args:
        message: what the client sent; unset fields take their defaults.
        prompt_tokens: length of the checked prompt.
        limits: bounds of max_tokens and of stop token ids.
        draw_seed: gives a 64-bit seed when the client sent none.
        num_choices: replies to make.
        num_returned: of these, how many are shown; choosing the best takes log-probabilities.

    Raises:
        InvalidRequestError: naming field, value and what would work.
        CapacityError: prompt plus max_tokens, or so many replies, exceed every decode worker (`ever` is set).
    """
    if message.top_k < 0:
        raise InvalidRequestError("sampling.top_k", message.top_k, "must be >= 0 (0 keeps all)")
    temperature = _number(
        message, "temperature", 1.0, lambda v: v >= 0, "must be finite and >= 0 (0 is greedy)"
    )
    logprobs = _top_logprobs(message, "logprobs")
    prompt_logprobs = _top_logprobs(message, "prompt_logprobs")
    max_tokens = _max_tokens(message, prompt_tokens, limits)
    _check_choices_fit(num_choices, prompt_tokens, limits)
    return SamplingParams(
        temperature=temperature,
        top_k=message.top_k,
        top_p=_number(message, "top_p", 1.0, lambda v: 0 < v <= 1, "must be > 0 and <= 1 (1 keeps all)"),
        min_p=_number(message, "min_p", 0.0, lambda v: 0 <= v <= 1, "must be >= 0 (keeps all) and <= 1"),
        presence_penalty=_penalty(message, "presence_penalty"),
        frequency_penalty=_penalty(message, "frequency_penalty"),
        repetition_penalty=_repetition_penalty(message),
        logit_bias=_logit_bias(message.logit_bias, limits.vocab_size),
        seed=message.seed if message.HasField("seed") else draw_seed(),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(message.min_tokens, max_tokens),
        stop=_stop(message.stop),
        stop_token_ids=_stop_token_ids(message.stop_token_ids, limits.vocab_size),
        ignore_eos=message.ignore_eos,
        logprobs=0 if logprobs is None and num_choices > num_returned else logprobs,
        prompt_logprobs=logprobs if prompt_logprobs is None and message.echo else prompt_logprobs,
        num_choices=num_choices,
    )


def _number(
    message: pb.SamplingParams, name: str, default: float, holds: Callable[[float], bool], hint: str
) -> float:
    value = float(getattr(message, name)) if message.HasField(name) else default
    if not (math.isfinite(value) and holds(value)):
        raise InvalidRequestError(f"sampling.{name}", value, hint)
    return value


def _penalty(message: pb.SamplingParams, name: str) -> float:
    hint = f"must be -{MAX_PENALTY:g} to {MAX_PENALTY:g} (0 changes nothing)"
    return _number(message, name, 0.0, lambda v: abs(v) <= MAX_PENALTY, hint)


def _repetition_penalty(message: pb.SamplingParams) -> float:
    least, most = 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    hint = f"must be {least:g} to {most:g} (1 changes nothing)"
    return _number(message, "repetition_penalty", 1.0, lambda v: least <= v <= most, hint)


def _top_logprobs(message: pb.SamplingParams, name: str) -> int | None:
    if not message.HasField(name):
        return None
    value = int(getattr(message, name))
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        hint = f"must be 0 (the token's own only) to {MAX_TOP_LOGPROBS}, or left out for none"
        raise InvalidRequestError(f"sampling.{name}", value, hint)
    return value


def _logit_bias(bias: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIAS:
        hint = f"at most {MAX_LOGIT_BIAS} are allowed"
        raise InvalidRequestError("sampling.logit_bias", f"{len(bias)} tokens", hint)
    for token, value in sorted(bias.items()):
        if not 0 <= token < vocab_size:
            hint = f"is outside the vocabulary; token ids are 0 to {vocab_size - 1}"
            raise InvalidRequestError("sampling.logit_bias", token, hint)
        if not abs(value) <= MAX_BIAS:
            hint = f"must be -{MAX_BIAS:g} to {MAX_BIAS:g}"
            raise InvalidRequestError(f"sampling.logit_bias[{token}]", value, hint)
    return tuple(sorted(bias.items()))


def _min_tokens(value: int, max_tokens: int) -> int:
    if not 0 <= value <= max_tokens:
        hint = f"must be 0 to max_tokens, which is {max_tokens}"
        raise InvalidRequestError("sampling.min_tokens", value, hint)
    return value


def _check_choices_fit(num_choices: int, prompt_tokens: int, limits: ModelLimits) -> None:
    """Refuse more replies than any decode worker could ever begin together."""
    if num_choices > limits.max_running:
        raise CapacityError(
            f"sampling.n (or best_of) asks for {num_choices} replies and decode workers write at most "
            f"{limits.max_running} together; ask for fewer, or raise --max-running",
            ever=True,
        )
    # Whole blocks of the prompt are shared; of a partial last one each further reply has a copy.
    num_blocks = -(-prompt_tokens // limits.block_tokens)
    if prompt_tokens % limits.block_tokens:
        num_blocks += num_choices - 1
    if num_blocks * limits.block_tokens > limits.max_pool_tokens:
        raise CapacityError(
            f"sampling.n (or best_of) asks for {num_choices} replies, which begin with {num_blocks} blocks of "
            f"{limits.block_tokens} tokens; the largest KV pool of a decode worker holds {limits.max_pool_tokens} "
            "tokens; ask for fewer, or raise --kv-memory",
            ever=True,
        )


def _max_tokens(message: pb.SamplingParams, prompt_tokens: int, limits: ModelLimits) -> int:
    room = limits.max_model_len - prompt_tokens
    pool_room = limits.max_pool_tokens - prompt_tokens
    if not message.HasField("max_tokens"):
        return min(room, pool_room)
    given = message.max_tokens
    if given < 1:
        raise InvalidRequestError(
            "sampling.max_tokens", given, "must be >= 1, or left out for as many as fit"
        )
    if given > room:
        hint = (
            f"the prompt has {prompt_tokens} tokens and max_model_len is {limits.max_model_len}; "
            f"at most {room} fit"
        )
        raise InvalidRequestError("sampling.max_tokens", given, hint)
    if given > pool_room:
        raise CapacityError(
            f"sampling.max_tokens={given}: with {prompt_tokens} prompt tokens that exceeds the largest KV "
            f"pool of a decode worker ({limits.max_pool_tokens} tokens); use at most {pool_room} or raise "
            "--kv-memory",
            ever=True,
        )
    return given


def _stop(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            "sampling.stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS} are allowed"
        )
    for index, text in enumerate(stop):
        if not text:
            raise InvalidRequestError(f"sampling.stop[{index}]", text, "must not be empty; leave it out")
        if len(text) > MAX_STOP_CHARACTERS:
            hint = f"has {len(text)} characters; at most {MAX_STOP_CHARACTERS} are allowed"
            raise InvalidRequestError(f"sampling.stop[{index}]", text, hint)
    return tuple(stop)


def _stop_token_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        hint = f"at most {MAX_STOP_TOKEN_IDS} are allowed"
        raise InvalidRequestError("sampling.stop_token_ids", f"{len(ids)} ids", hint)
    return check_token_ids(ids, vocab_size, field="sampling.stop_token_ids")
