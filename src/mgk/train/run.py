"""The folder of a run: everything needed to repeat it, to resume it, and to see how it went.

config.json    the configuration             run.json      versions, commit, data checksum, machine of every start
log.jsonl      one line per log interval     result.json   the final scores, written at the end
last, best     see checkpoint.py             events.*      TensorBoard events, if enabled
.lock          held by the process that trains
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from mgk.environment import environment
from mgk.files import flush, holder, locked, parse_line, read_lines, write_json, write_text
from mgk.train import checkpoint, config
from mgk.train.checkpoint import CheckpointError, DiskFullError
from mgk.train.config import Config
from mgk.train.data import read_starts

PAUSE = 2.0  # seconds between two looks at a full disk
T = TypeVar("T")


class Run:
    """A run on disk. Only the process with `writes=True` changes it; between `begin` and the end it holds a lock."""

    def __init__(self, folder: Path, settings: Config, *, resume: bool, writes: bool) -> None:
        self.folder, self.config, self.resume, self.writes = folder, settings, resume, writes
        self.keep = checkpoint.Keep(settings.save.newest, settings.save.every)
        self.events: Any = None
        self.interrupted: Callable[[], bool] = lambda: False
        """Whether the run is asked to stop, and must not wait for disk space."""
        self.held = ExitStack()
        self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self.events is not None:
            self.events.close()
        self.held.close()

    @property
    def resumes(self) -> bool:
        """Whether there is something to resume. Before its first checkpoint a run may start with other settings."""
        if not (self.folder / "config.json").exists():
            return False
        return checkpoint.find(self.folder) is not None or (self.folder / "result.json").exists()

    def check(self) -> None:
        """Raise an error if the folder is not that of this run, or of no run yet."""
        folder = self.folder
        exists = (folder / "config.json").exists()
        if exists and not self.resume:
            raise ValueError(f"{folder}: holds a run already; continue it with --resume, or choose another --out")
        if folder.exists() and not exists and any(path for path in folder.iterdir() if not path.name.startswith(".")):
            raise ValueError(f"{folder}: expected the folder of a run or an empty one, found other files")
        if self.resumes:
            config.check_same(config.read(folder / "config.json"), self.config, folder)

    def tidy_finished(self) -> None:
        """Remove what a process left that was killed just after it had written the result."""
        lock = self.folder / ".lock"
        if self.writes and lock.exists():
            with locked(lock, wait=False, remove=True) as ours:
                if ours:
                    checkpoint.recover(self.folder, self.keep)

    def begin(self, facts: dict[str, Any]) -> None:
        """Lock the run, repair what a killed process left, write the configuration, and append `facts` and the
        environment; raise an error if another process trains this run, or if the data has changed.
        """
        if self.writes:
            lock = self.folder / ".lock"
            if not self.held.enter_context(locked(lock, wait=False, remove=True)):
                raise ValueError(
                    f"{self.folder}: {holder(lock)} trains this run; wait until it has ended, or choose another --out"
                )
            self.check()  # another process may have started it since
            checkpoint.recover(self.folder, self.keep)
        path = self.folder / "run.json"
        advice = "; remove it to continue without the record of earlier starts"
        starts = read_starts(self.folder, advice) if self.resumes else []
        now = facts["data"]["digest"]
        before = starts[0].get("data", {}).get("digest", now) if starts else now  # older runs lack it
        if before != now:
            raise ValueError(
                f"data: the run in {self.folder} was started with data of digest {before[:12]}, got {now[:12]}; "
                "resume it with the same data, or choose another --out"
            )
        if not self.writes:
            return
        if not self.resumes:
            write_text(self.folder / "config.json", config.dump(self.config))
        write_json(path, {"starts": [*starts, facts | environment()]})
        if self.config.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ValueError("tensorboard: not installed; pip install 'mgk[tensorboard]'") from None
            self.events = SummaryWriter(str(self.folder))  # type: ignore[no-untyped-call]

    def rewind(self, step: int) -> None:
        """Remove the log lines after a step, since those steps are repeated, and lines that cannot be read."""
        path = self.folder / "log.jsonl"
        if not self.writes or not path.exists():
            return
        lines = path.read_bytes().splitlines(keepends=True)
        kept, broken = [], []
        for number, line in enumerate(lines, 1):
            values = parse_line(line)
            if values is None or type(values.get("step")) is not int:
                broken.append(number)
            elif values["step"] <= step and values.get("event") != "test":
                kept.append(line)
        if broken:
            some = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
            print(f"{path}: dropped {len(broken)} lines that cannot be read: {some}", file=sys.stderr, flush=True)
        if kept != lines:
            write_text(path, b"".join(kept).decode())

    def log(self, event: str, step: int, **values: Any) -> None:
        """Append a line to the log."""
        if not self.writes:
            return
        line = json.dumps({"event": event, "step": step, **values})
        self.when_it_fits(lambda: append(self.folder / "log.jsonl", line + "\n"))
        if self.events is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self.events.add_scalar(f"{event}/{name}", value, step)

    def lines(self, event: str) -> list[dict[str, Any]]:
        """The log lines of one kind."""
        return [line for line in read_lines(self.folder / "log.jsonl") if line.get("event") == event]

    def flush_log(self) -> None:
        """Wait until the log is on disk: a checkpoint follows it."""
        if self.writes and (self.folder / "log.jsonl").exists():
            flush(self.folder / "log.jsonl")

    def when_it_fits(self, write: Callable[[], T]) -> T:
        """Write something; while the disk is full, wait until there is space or the run is asked to stop."""
        told = False
        while True:
            try:
                return write()
            except (DiskFullError, OSError) as error:
                if self.interrupted() or (isinstance(error, OSError) and error.errno not in checkpoint.FULL):
                    raise
                if not told:
                    print(f"paused until there is space, or Ctrl-C: {error}", file=sys.stderr, flush=True)
                    told = True
            time.sleep(PAUSE)

    def finish(self, values: dict[str, Any]) -> None:
        """Write the final scores: the run is over."""
        if self.writes:
            self.when_it_fits(lambda: write_json(self.folder / "result.json", values))


def append(path: Path, text: str) -> None:
    """Append to a file, all or nothing."""
    content = text.encode()
    try:
        with open(path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):
                    os.truncate(path, size)
                raise
    except OSError as error:
        kind = DiskFullError if error.errno in checkpoint.FULL else CheckpointError
        raise kind(
            f"{path}: cannot be written ({error.strerror}); free disk space and continue from the last "
            "checkpoint with --resume"
        ) from error
