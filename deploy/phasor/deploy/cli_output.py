"""What the `phasor` command writes: a model's text as it streams, the dim line below it, progress of a fetch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as ProgressBars

from phasor.client import AsyncReply, Delta, Finished, Prompt
from phasor.core.request import FinishReason
from phasor.engine.packaged_model import Progress, ProgressCallback, Stage

# A model's text may hold escape sequences, which would take over the terminal.
_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def stderr_console() -> Console:
    """Return a console for everything that is not the answer itself, so that the answer alone can be piped."""
    return Console(stderr=True, highlight=False)


async def stream(reply: AsyncReply) -> Finished:
    """Write a reply to standard output as it arrives; end it with a newline. Further replies follow when all ended.

    Returns:
        the reply's last event.

    Raises:
        PhasorError: what the server refused or lost; what had arrived is on the screen, on a line of its own.
    """
    is_terminal = sys.stdout.isatty()
    last = "\n"
    try:
        async for event in reply:
            if isinstance(event, Prompt) or (isinstance(event, Delta) and event.index == 0):
                last = _write(event.text, is_terminal) or last
    finally:
        if last != "\n":
            _write("\n", is_terminal)
    completion = reply.completion()
    echoed = completion.prompt.text if completion.prompt is not None else ""
    for choice in completion.choices[1:]:
        _write(f"\n{echoed}{choice.text}\n", is_terminal)
    return completion.finished


def _write(text: str, is_terminal: bool) -> str:
    """Write text to standard output at once; return its last character."""
    sys.stdout.write(text.translate(_CONTROLS) if is_terminal else text)
    sys.stdout.flush()
    return text[-1:]


def usage_line(finished: Finished) -> str:
    """Return what a reply cost, in one line."""
    usage, timing = finished.usage, finished.timing
    parts = [f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)"]
    reply = f"{usage.completion_tokens} generated"
    decoding_s = timing.total_s - timing.first_token_s
    if usage.completion_tokens > 1 and decoding_s > 0:
        reply += f" at {(usage.completion_tokens - 1) / decoding_s:.1f}/s"
    if finished.finish_reason is FinishReason.LENGTH:
        reply += ", cut off at the limit"
    parts.append(reply)
    parts.append(f"first token after {timing.first_token_s:.2f} s")
    if usage.transferred_bytes:
        parts.append(f"{usage.transferred_bytes / 1e6:.1f} MB of KV moved")
    return " | ".join(parts)


def print_usage(console: Console, finished: Finished) -> None:
    """Print the usage line, dim."""
    console.print(usage_line(finished), style="dim", markup=False, soft_wrap=True)


@contextmanager
def fetch_progress(console: Console, name: str) -> Iterator[ProgressCallback]:
    """Show a model's fetch: bars on a terminal, one line per stage elsewhere, nothing if nothing is to be done.

    Args:
        console: where.
        name: the model, as the user called it.
    """
    if not console.is_terminal:
        yield _Lines(console, name)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with ProgressBars(*columns, console=console) as bars:
        yield _Bars(bars, name)


class _Lines:
    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        self._stage: Stage | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.stage is self._stage:
            return
        self._stage = progress.stage
        size = f" ({progress.total_bytes / 1e6:.0f} MB)" if progress.total_bytes else ""
        self._console.print(f"{self._name}: {progress.stage}{size} ...", markup=False, soft_wrap=True)


class _Bars:
    def __init__(self, bars: ProgressBars, name: str) -> None:
        self._bars, self._name = bars, name
        self._tasks: dict[Stage, TaskID] = {}
        self._current: Stage | None = None

    def __call__(self, progress: Progress) -> None:
        stage = progress.stage
        if stage is not self._current:
            self._end_current()
            self._current = stage
            self._tasks[stage] = self._bars.add_task(escape(f"{self._name}: {stage}"), total=None)
        # Without a total the bar pulses: something is going on, nobody knows how far.
        self._bars.update(
            self._tasks[stage], completed=progress.done_bytes, total=progress.total_bytes or None
        )

    def _end_current(self) -> None:
        if self._current is not None:
            task = self._tasks[self._current]
            if self._bars.tasks[task].total is None:
                self._bars.update(task, total=1, completed=1)
            self._bars.stop_task(task)
