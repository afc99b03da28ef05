"""Time as an argument: what needs a clock takes one, so tests can turn it by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. Only differences mean anything."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary, fixed moment."""
        ...


class MonotonicClock:
    """The process's monotonic clock."""

    def now_s(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until told to move."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the time set by the last `advance`."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`, which may not be negative."""
        if seconds < 0:
            raise ValueError(f"seconds must be >= 0, got {seconds}")
        self._now_s += seconds
