"""The folder of a run: everything needed to repeat it, to resume it, and to see how it went.

config.json    the configuration             run.json      versions, commit, data checksum, machine of every start
log.jsonl      one line per log interval     result.json   the final scores, written at the end
last, best     see checkpoint.py             events.*      TensorBoard events, if enabled
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mgk.environment import environment
from mgk.files import read_lines, write_json, write_text
from mgk.train import checkpoint, config
from mgk.train.checkpoint import CheckpointError
from mgk.train.config import Config


class Run:
    """A run on disk. Only the process with `writes=True` changes it."""

    def __init__(self, folder: Path, settings: Config, *, resume: bool, writes: bool) -> None:
        self.folder, self.config, self.writes = folder, settings, writes
        there = (folder / "config.json").exists()
        if there and not resume:
            raise ValueError(f"{folder}: holds a run already; continue it with --resume, or choose another --out")
        if folder.exists() and not there and any(path for path in folder.iterdir() if not path.name.startswith(".")):
            raise ValueError(f"{folder}: expected the folder of a run or an empty one, found other files")
        # Before its first checkpoint a run may start again with another configuration.
        self.begun = there and any((folder / name).exists() for name in ("last", "best", "result.json"))
        if self.begun:
            config.check_same(config.read(folder / "config.json"), settings, folder)
        self.events: Any = None

    def begin(self, facts: dict[str, Any]) -> None:
        """Write the configuration, and append `facts` and the environment; raise an error if the data has changed."""
        path = self.folder / "run.json"
        starts = json.loads(path.read_text())["starts"] if self.begun and path.exists() else []
        now = facts["data"]["digest"]
        before = starts[0].get("data", {}).get("digest", now) if starts else now  # older runs lack it
        if before != now:
            raise ValueError(
                f"data: the run in {self.folder} was started with data of digest {before[:12]}, got {now[:12]}; "
                "resume it with the same data, or choose another --out"
            )
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.begun:
            write_text(self.folder / "config.json", config.dump(self.config))
        write_json(path, {"starts": [*starts, facts | environment()]})
        if self.config.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ValueError("tensorboard: not installed; pip install 'mgk[tensorboard]'") from None
            self.events = SummaryWriter(str(self.folder))  # type: ignore[no-untyped-call]

    def restore(self) -> checkpoint.Checkpoint | None:
        """Return the newest checkpoint, or None. Log lines after it are removed, since those steps are repeated."""
        place = checkpoint.newest(self.folder)
        found = None if place is None else checkpoint.load(place)
        step = 0 if found is None else found.step
        path = self.folder / "log.jsonl"
        if self.writes and path.exists():
            kept = [line for line in read_lines(path) if line["step"] <= step]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        return found

    def log(self, event: str, step: int, **numbers: float) -> None:
        if not self.writes:
            return
        line = json.dumps({"event": event, "step": step, **numbers})
        try:
            with open(self.folder / "log.jsonl", "a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise CheckpointError(
                f"{self.folder / 'log.jsonl'}: cannot be written ({error.strerror}); "
                "free disk space and continue from the last checkpoint with --resume"
            ) from error
        if self.events is not None:
            for name, value in numbers.items():
                self.events.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        if self.events is not None:
            self.events.close()
