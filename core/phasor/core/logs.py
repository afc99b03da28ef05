"""Logs as one line per event: for people (logfmt after the message) or for programs (JSON). Standard logging.

An event is a short name with fields, the request's id among them, the same in router, prefill and decode worker:

    2026-12-01T04:50:18.123Z INFO phasor.router.edge finished request_id=req-1 finish_reason=length total_s=0.214

Fields are numbers, names and ids; never prompts, replies or token ids.
"""

import json
import logging
import sys
import time
from typing import Any, Literal, TextIO

from phasor.core.errors import InvalidRequestError, PhasorError

LogFormat = Literal["text", "json"]

_MAX_ID = 128
_FIELDS = "phasor_fields"
"""The attribute of a LogRecord that holds an event's fields."""


def log_event(
    logger: logging.Logger,
    event: str,
    *,
    request_id: str,
    level: int = logging.INFO,
    **fields: str | float | bool | None,
) -> None:
    """Log that something happened to a request.

    Args:
        logger: of the module where it happened.
        event: a short name, such as "admitted".
        request_id: as the client or the router chose it.
        level: of `logging`.
        fields: what goes with it; None is left out. Seconds are rounded to microseconds.
    """
    if not logger.isEnabledFor(level):
        return
    # A client's id, not yet checked, may be of any length.
    shown = {
        "request_id": request_id[:_MAX_ID],
        **{k: _rounded(v) for k, v in fields.items() if v is not None},
    }
    logger.log(level, "%s", event, extra={_FIELDS: shown}, stacklevel=2)


def error_fields(error: PhasorError) -> dict[str, str]:
    """Return what a log may say of an error: code, class and reason, without a value that a client sent."""
    reason = f"{error.field}: {error.hint}" if isinstance(error, InvalidRequestError) else str(error)
    return {"code": error.grpc_code, "error": type(error).__name__, "reason": reason}


def configure_logging(
    log_format: LogFormat, *, level: int | str = logging.INFO, stream: TextIO | None = None
) -> None:
    """Send this process's log to `stream` in one format; whatever handlers the root logger had are replaced.

    Args:
        log_format: "text" or "json".
        level: the least severe that Phasor writes; other libraries write warnings and errors.
        stream: standard error by default.
    """
    handler = logging.StreamHandler(stream) if stream is not None else _StandardError()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("phasor").setLevel(level)


class _StandardError(logging.StreamHandler[TextIO]):
    """Whatever `sys.stderr` is at the moment of writing: it may be replaced, and the old one closed."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, then the event's fields as logfmt. Tracebacks follow on lines of their own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = getattr(record, _FIELDS, {})
        parts = [_utc(record), record.levelname, record.name, record.getMessage()]
        parts += [f"{name}={_logfmt(value)}" for name, value in fields.items()]
        line = " ".join(parts)
        trace = _traceback(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, `event` with its fields or `message`, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = getattr(record, _FIELDS, None)
        row: dict[str, Any] = {"time": _utc(record), "level": record.levelname, "logger": record.name}
        row["message" if fields is None else "event"] = record.getMessage()
        row.update(fields or {})
        trace = _traceback(self, record)
        if trace:
            row["exception"] = trace
        return json.dumps(row, ensure_ascii=False, default=str)


def _utc(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def _rounded(value: str | float | bool) -> str | float | bool:
    return round(value, 6) if isinstance(value, float) else value


def _logfmt(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    is_plain = text.isprintable() and not any(c in text for c in ' "=')
    return text if text and is_plain else json.dumps(text)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""
