"""Progress display: a bar if there is a terminal and rich is installed, otherwise a line every 10 seconds."""

from __future__ import annotations

import sys
import time
from typing import Any, Self


class Progress:
    """Show the steps done, the latest numbers and the time left; with `quiet`, nothing."""

    def __init__(self, title: str, steps: int, start: int = 0, *, quiet: bool = False) -> None:
        self.title, self.steps, self.first = title, steps, start
        self.numbers: dict[str, str] = {}
        self.began = self.shown = time.monotonic()
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

    def show(self, step: int, **numbers: float) -> None:
        self.numbers |= {name: text(name, value) for name, value in numbers.items()}
        line = "  ".join(f"{name} {value}" for name, value in self.numbers.items())
        if self.bar is not None:
            self.bar.update(self.task, completed=step, numbers=line)
        elif not self.quiet and (time.monotonic() - self.shown > 10 or step == self.steps):
            self.shown = time.monotonic()
            left = (self.shown - self.began) / max(step - self.first, 1) * (self.steps - step)
            print(f"{self.title}: step {step}/{self.steps}  {line}  {left:.0f} s left", file=sys.stderr, flush=True)


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
