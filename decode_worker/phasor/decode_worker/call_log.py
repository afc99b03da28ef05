"""What a decode worker logs of one Decode call: when it was admitted, and how it finished."""

import logging
import time

from phasor.core.logs import log_event
from phasor.v1.worker_pb2 import DecodeEvent, DecodeFinished
from phasor.wire.convert import choice_end_from_pb

_log = logging.getLogger(__name__)


class CallLog:
    """One call's log lines. Event loop only: the engine thread writes no log of a request.

    Args:
        request_id: as the router knows it.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._start_s = time.monotonic()
        self._first_token_s: float | None = None

    def note(self, event: DecodeEvent) -> None:
        """Log an event of the stream, if it is one that is logged."""
        now_s = time.monotonic() - self._start_s
        if event.HasField("admitted"):
            ticket = event.admitted.ticket
            log_event(
                _log,
                "admitted",
                request_id=self._request_id,
                cached_tokens=event.admitted.cached_tokens,
                ticket_id=ticket.ticket_id or None,
                num_blocks=ticket.num_blocks if ticket.ticket_id else None,
                queue_s=now_s,
            )
        elif event.HasField("finished"):
            self._finished(event.finished, now_s)
        elif self._first_token_s is None:
            self._first_token_s = now_s

    def _finished(self, finished: DecodeFinished, now_s: float) -> None:
        usage = finished.usage
        reasons = [choice_end_from_pb(choice).reason for choice in finished.choices]
        log_event(
            _log,
            "finished",
            request_id=self._request_id,
            finish_reason="/".join(reasons),
            completion_tokens=usage.completion_tokens,
            decode_computed_tokens=usage.decode_computed_tokens,
            transferred_tokens=usage.transferred_tokens,
            num_preemptions=usage.num_preemptions,
            first_token_s=self._first_token_s,
            total_s=now_s,
        )
