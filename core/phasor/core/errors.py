"""Every error Phasor raises on purpose.

    PhasorError
    |- ConfigError(ValueError)      a configuration value, key, file or combination
    |  `- UnsupportedModelError     a model feature that is refused, by name
    |- RequestError                 what one client asked for
    |  |- InvalidRequestError(ValueError)   a field is wrong; carries field, value, hint
    |  |- ModelNotFoundError                the named model is not served here
    |  |- RequestCancelledError             the client went away or cancelled
    |  `- DeadlineExceededError             the request's own deadline passed
    |- CapacityError                no room now (retryable) or ever (see `ever`)
    |- TransferError                pages did not arrive
    |  |- LinkMismatchError                 the two ends may not exchange pages; names the field
    |  `- TransferTimeoutError              the other end fell silent
    |- StoreError                   the shared prefix store
    |- WorkerLostError              a worker died, fell silent, or is another incarnation
    `- InternalError                ours: a bug, reported as such

Every class can be pickled (Ray carries errors between processes) and keeps its fields. `grpc_code` is the
name of the gRPC status a client sees; `phasor.wire.status` is the only place that uses it.
"""

from typing import Any, ClassVar


def _rebuild(cls: "type[PhasorError]", message: str, fields: dict[str, Any]) -> "PhasorError":
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


class PhasorError(Exception):
    """The root: catch this to catch everything Phasor raises on purpose."""

    grpc_code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from message and fields, whatever the subclass's `__init__` takes."""
        return (_rebuild, (type(self), str(self), dict(self.__dict__)))


class ConfigError(PhasorError, ValueError):
    """A configuration value, key, file or combination cannot work.

    Args:
        field: dotted name of the key or flag.
        value: what was given.
        hint: what would work, as a sentence fragment.
    """

    grpc_code = "FAILED_PRECONDITION"

    def __init__(self, field: str, value: object, hint: str) -> None:
        super().__init__(f"{field}={value!r}: {hint}")
        self.field, self.value, self.hint = field, value, hint


class UnsupportedModelError(ConfigError):
    """The model has a feature that would be served wrongly, so it is refused by name."""


class RequestError(PhasorError):
    """Something about one client's request."""

    grpc_code = "INVALID_ARGUMENT"


class InvalidRequestError(RequestError, ValueError):
    """A field of the request is wrong; the message names field, value and the way out."""

    def __init__(self, field: str, value: object, hint: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}={shown}: {hint}")
        self.field, self.value, self.hint = field, value, hint


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    grpc_code = "NOT_FOUND"

    def __init__(self, model: str, served: str) -> None:
        super().__init__(
            f"model={model!r} is not served here; served: {served!r} (leave `model` empty to use it)"
        )
        self.model, self.served = model, served


class RequestCancelledError(RequestError):
    """The client disconnected or cancelled."""

    grpc_code = "CANCELLED"


class DeadlineExceededError(RequestError):
    """The request's own deadline passed before it was finished."""

    grpc_code = "DEADLINE_EXCEEDED"


class CapacityError(PhasorError):
    """There is no room.

    Args:
        message: what was asked for and what there is, with numbers.
        ever: True when waiting cannot help (the request exceeds the whole pool).
    """

    grpc_code = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, message: str, *, ever: bool = False) -> None:
        super().__init__(message)
        self.ever = ever


class TransferError(PhasorError):
    """Pages did not get from one worker to another."""

    grpc_code = "UNAVAILABLE"
    retryable = True


class LinkMismatchError(TransferError):
    """Two workers may not exchange pages: a field of their identities differs."""

    grpc_code = "FAILED_PRECONDITION"
    retryable = False

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(
            f"identity field {field!r} differs: ours {ours!r}, theirs {theirs!r}; "
            "serve the same model, dtype, rope and block size on both workers"
        )
        self.field, self.ours, self.theirs = field, ours, theirs


class TransferTimeoutError(TransferError):
    """The other end of a link fell silent for longer than allowed."""


class StoreError(PhasorError):
    """The shared prefix store failed; for a request this is a miss, never an error."""

    grpc_code = "UNAVAILABLE"
    retryable = True


class WorkerLostError(PhasorError):
    """A worker died, fell silent, or was replaced by another incarnation."""

    grpc_code = "UNAVAILABLE"
    retryable = True


class InternalError(PhasorError):
    """A bug in Phasor. The message carries the request id to look for in the logs."""


def all_error_types() -> list[type[PhasorError]]:
    """Return every class of the tree, root first."""
    found: list[type[PhasorError]] = [PhasorError]
    for cls in found:
        found.extend(sub for sub in cls.__subclasses__() if sub not in found)
    return found
