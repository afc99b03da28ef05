"""Errors across gRPC, both ways: Phasor's tree to status codes, and status codes back to Phasor's tree."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from phasor.core.errors import (
    CapacityError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    PhasorError,
    RequestCancelledError,
    WorkerLostError,
    all_error_types,
)

ERROR_METADATA_KEY = "phasor-error"
"""Trailing metadata: JSON {"type": class name, "fields": {...}}, so that the caller can raise the same error."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def errors_to_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn a PhasorError raised inside into the call's status; anything else into INTERNAL, logged once."""
    try:
        yield
    except PhasorError as exc:
        await _abort(context, exc)
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception as exc:
        _log.exception("bug while serving a call")
        await _abort(context, InternalError(f"internal error ({type(exc).__name__}); see the server's log"))


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: PhasorError) -> None:
    fields = {k: v for k, v in vars(error).items() if isinstance(v, str | int | float | bool | type(None))}
    detail = json.dumps({"type": type(error).__name__, "fields": fields}, ensure_ascii=True)
    code = getattr(grpc.StatusCode, error.grpc_code)
    await context.abort(code, str(error), trailing_metadata=((ERROR_METADATA_KEY, detail),))


def error_from_status(exc: grpc.RpcError, *, peer: str) -> PhasorError:
    """Return the PhasorError that a failed call stands for.

    Args:
        exc: what the call raised.
        peer: who was called, for the message of a lost connection.
    """
    code, details = exc.code(), exc.details() or ""
    for key, value in _trailing(exc):
        if key == ERROR_METADATA_KEY:
            return _rebuild(str(value), details)
    if code is grpc.StatusCode.CANCELLED:
        return RequestCancelledError(details or "cancelled")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError(f"{peer} did not answer in time")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CapacityError(f"{peer}: {details}")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError("request", "", details)
    if code is grpc.StatusCode.UNAVAILABLE:
        return WorkerLostError(f"{peer} is unreachable: {details}")
    return InternalError(f"{peer}: {code.name if code else 'UNKNOWN'}: {details}")


def _trailing(exc: grpc.RpcError) -> list[tuple[str, str | bytes]]:
    metadata = getattr(exc, "trailing_metadata", None)
    return list(metadata() or ()) if metadata is not None else []


def _rebuild(detail: str, message: str) -> PhasorError:
    try:
        parsed = json.loads(detail)
        name, fields = str(parsed["type"]), dict(parsed["fields"])
    except (ValueError, KeyError, TypeError):
        return InternalError(message)
    for cls in all_error_types():
        if cls.__name__ == name:
            error = cls.__new__(cls)
            Exception.__init__(error, message)
            error.__dict__.update(fields)
            return error
    return InternalError(message)
