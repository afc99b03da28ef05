"""Log lines: one event, one line, the same fields in both formats, and nothing that a client wrote."""

import io
import json
import logging
import shlex
from collections.abc import Iterator

import pytest

from phasor.core.errors import CapacityError, InvalidRequestError
from phasor.core.logs import configure_logging, error_fields, log_event


@pytest.fixture(autouse=True)
def _root_as_it_was() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("phasor")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def logged(log_format: str, level: int = logging.INFO) -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    configure_logging(log_format, level=level, stream=stream)  # type: ignore[arg-type]
    return logging.getLogger("phasor.test"), stream


def test_an_event_is_one_json_object() -> None:
    log, stream = logged("json")
    log_event(log, "finished", request_id="req-1", total_s=0.12345678, finish_reason="stop", ticket_id=None)
    row = json.loads(stream.getvalue())
    assert row.pop("time").endswith("Z")
    assert row == {
        "level": "INFO", "logger": "phasor.test", "event": "finished",
        "request_id": "req-1", "total_s": 0.123457, "finish_reason": "stop",
    }  # fmt: skip


def test_an_event_is_one_line_of_logfmt() -> None:
    log, stream = logged("text")
    log_event(log, "failed", request_id="a b", reason='said "no"\nand left', is_last=True, empty="")
    line = stream.getvalue()
    assert line.count("\n") == 1
    time, level, name, event, *fields = shlex.split(line)
    assert (level, name, event) == ("INFO", "phasor.test", "failed") and time.endswith("Z")
    assert fields == ["request_id=a b", 'reason=said "no"\\nand left', "is_last=true", "empty="]


def test_an_ordinary_message_and_a_traceback_are_one_json_object() -> None:
    log, stream = logged("json")
    try:
        raise ValueError("wrong\nvalue")
    except ValueError:
        log.exception("it broke: %s", "this")
    row = json.loads(stream.getvalue())
    assert row["message"] == "it broke: this" and "ValueError: wrong" in row["exception"]


def test_what_is_below_the_level_is_not_written_and_others_only_warn() -> None:
    log, stream = logged("text", logging.WARNING)
    log_event(log, "accepted", request_id="req-1")
    logging.getLogger("somebody.else").info("chatter")
    assert stream.getvalue() == ""
    logging.getLogger("somebody.else").warning("trouble")
    assert "trouble" in stream.getvalue()


def test_an_unchecked_id_is_cut() -> None:
    log, stream = logged("json")
    log_event(log, "failed", request_id="x" * 5000)
    assert json.loads(stream.getvalue())["request_id"] == "x" * 128


def test_an_error_is_logged_without_the_value_that_the_client_sent() -> None:
    fields = error_fields(InvalidRequestError("prompt", "my secret prompt", "is too long"))
    assert fields == {
        "code": "INVALID_ARGUMENT",
        "error": "InvalidRequestError",
        "reason": "prompt: is too long",
    }
    assert error_fields(CapacityError("full: 3 of 3"))["reason"] == "full: 3 of 3"
