"""Report a step that takes much longer than the others, as a lost process or a stuck disk makes it, with its stacks.

Every process watches itself: if one is lost, the others wait for it, and each writes where it waits.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TextIO

SLOW = 20.0  # a step is reported if it takes this many times the median
LEAST = 10.0  # and at least this many seconds
KNOWN = 5  # steps until the median means something


class Watch:
    """Watches the steps of one process. Evaluations and checkpoints are not steps: call `rest` before them."""

    def __init__(self, folder: Path, rank: int, hang_minutes: float = 0.0) -> None:
        self.path, self.rank, self.limit = folder / f"stacks-{rank}.txt", rank, 60 * hang_minutes
        self.times: deque[float] = deque(maxlen=101)
        self.began: float | None = None
        self.step, self.reported, self.armed = 0, False, 0.0
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self.stacks: TextIO | None = None

    def __enter__(self) -> Watch:
        self.thread.start()
        self._arm()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        self.thread.join()
        if self.limit:
            faulthandler.cancel_dump_traceback_later()
        if self.stacks is not None:
            self.stacks.close()

    def beat(self, step: int) -> float | None:
        """Note the end of a step and the start of the next; return the seconds of this one if it was reported."""
        now = time.monotonic()
        taken = None if self.began is None else now - self.began
        slow = taken if self.reported else None
        if taken is not None:
            self.times.append(taken)
        self.step, self.began, self.reported = step, now, False
        self._arm()
        return slow

    def rest(self) -> None:
        """Note that something else than a step begins."""
        self.began, self.reported = None, False

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def _arm(self) -> None:
        """Set the time limit after which the process ends. It works also if Python itself is stuck."""
        now = time.monotonic()
        if self.limit and now - self.armed > min(1.0, self.limit / 10):
            self.armed = now
            faulthandler.dump_traceback_later(self.limit, file=self._open(), exit=True)

    def _open(self) -> TextIO:
        if self.stacks is None:
            self.stacks = open(self.path, "a")  # noqa: SIM115  # for as long as the watch
        return self.stacks

    def _look(self) -> None:
        while not self.closed.wait(LEAST / 10):
            began, times = self.began, list(self.times)
            if began is None or self.reported or len(times) < KNOWN:
                continue
            taken, usual = time.monotonic() - began, statistics.median(times)
            if taken > max(LEAST, SLOW * usual) and began == self.began:
                self.reported = True
                self._report(f"step {self.step} has taken {taken:.1f} s so far, the median is {usual:.3g} s")

    def _report(self, line: str) -> None:
        where = f"process {self.rank} ({os.getpid()} on {socket.gethostname()})"
        file = self._open()
        file.write(f"{where}: {line}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.flush()
        print(f"{where}: {line}; stacks in {self.path}", file=sys.stderr, flush=True)
