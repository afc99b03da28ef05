"""What a person sees while Phasor starts: a spinner on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from phasor.deploy.fleet_state import Member, MemberState


class Display:
    """Stages of a start, one after another. Writes to `console` only."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def stage(self, title: str) -> Iterator[Callable[[str], None]]:
        """Show `title` as under way; yield a function that shows details; end with the seconds it took."""
        began_s = time.monotonic()
        if self.console.is_terminal:
            with self.console.status(escape(title)) as status:
                yield lambda detail: status.update(f"{escape(title)} [dim]{escape(detail)}[/dim]")
        else:
            last = [""]

            def line(detail: str) -> None:
                if detail != last[0]:
                    last[0] = detail
                    self.say(f"  {detail}")

            self.say(f"{title} ...")
            yield line
        self.console.print(
            f"[green]done[/green] {escape(title)} [dim]({time.monotonic() - began_s:.1f} s)[/dim]"
        )

    def say(self, text: str) -> None:
        """Print one line as it is."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def describe_members(members: Sequence[Member]) -> str:
    """Return the fleet in one line: `decode-0 ready, prefill-0 starting (attempt 2; last: ...)`."""
    parts = []
    for member in members:
        text = f"{member.slot} {member.state}"
        if member.last_error and member.state is not MemberState.READY:
            text += f" (attempt {member.launch}; last: {member.last_error})"
        elif member.num_restarts:
            text += f" (attempt {member.launch})"
        parts.append(text)
    return ", ".join(parts)
