"""Progress display: a bar if there is a terminal and rich is installed, otherwise a line every 10 seconds.

The first line comes after the first seconds, with an estimate of the time.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Self

FIRST, NEXT = 3.0, 10.0  # seconds until the first line, and between two of them


class Progress:
    """Show the steps done, the latest numbers and the time left; with `quiet`, nothing."""

    def __init__(self, title: str, steps: int, start: int = 0, *, quiet: bool = False) -> None:
        self.title, self.steps, self.first = title, steps, start
        self.numbers: dict[str, str] = {}
        self.began = time.monotonic()
        self.due = self.began + FIRST
        self.quiet = quiet
        self.bar: Any = make_bar() if not quiet and sys.stderr.isatty() else None
        if self.bar is not None:
            self.task = self.bar.add_task(title, total=steps, completed=start, numbers="")

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step)
        else:
            self._print(step)

    def note(self, text: str) -> None:
        """Print a text between the numbers."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        elif not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def show(self, step: int, **numbers: float) -> None:
        self.numbers |= {name: text(name, value) for name, value in numbers.items()}
        if self.bar is not None:
            self.bar.update(self.task, completed=step, numbers=self._line())
        else:
            self._print(step, last=step == self.steps)

    def _line(self) -> str:
        return "  ".join(f"{name} {value}" for name, value in self.numbers.items())

    def _print(self, step: int, *, last: bool = False) -> None:
        """Print a line, if it is time for one or it is the last."""
        now = time.monotonic()
        if self.quiet or step == self.first or (now < self.due and not last):
            return
        self.due = now + NEXT
        left = duration((now - self.began) / (step - self.first) * (self.steps - step))
        parts = [f"{self.title}: step {step:,}/{self.steps:,}", self._line(), f"{left} left"]
        print("  ".join(filter(None, parts)), file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def text(name: str, value: float) -> str:
    if name.endswith("accuracy"):
        return f"{value:.2%}"
    if name.endswith("/s") or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 0.01 else f"{value:.3f}"


def make_bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = (
        "{task.description}",
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    return Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True))
