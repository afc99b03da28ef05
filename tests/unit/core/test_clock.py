"""Clocks: one that turns by hand, one that only moves forward."""

import pytest

from phasor.core.clock import ManualClock, MonotonicClock


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock.now_s() == clock.now_s() == 5.0
    clock.advance(0.25)
    clock.advance(0.0)
    assert clock.now_s() == 5.25


def test_a_manual_clock_does_not_go_back() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="seconds must be >= 0, got -1"):
        clock.advance(-1)
    assert clock.now_s() == 0.0


def test_the_real_clock_never_goes_back() -> None:
    clock = MonotonicClock()
    readings = [clock.now_s() for _ in range(100)]
    assert readings == sorted(readings)
