"""Calls from link threads into the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Have the loop call `function(*args)`, in order; nothing happens once the loop is closed (the process ends)."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
