"""Kill a program before every change that it makes to files, as an audit hook of Python sees them.

Files that C++ and Rust write (`torch.save`, `save_file`) pass no audit hook. They count as two changes: before, and
when half of the file is written.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mgk.train import checkpoint

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
KILLED = -signal.SIGKILL


class Killer:
    """Counts changes below a folder, and kills this process before change number `moment`."""

    def __init__(self, folder: Path, moment: int, without: Path | None = None) -> None:
        self.start, self.left, self.without = str(folder), moment, str(without)
        sys.addaudithook(self.hook)
        for module, name in ((torch, "save"), (checkpoint, "save_file")):
            setattr(module, name, self.torn(getattr(module, name)))

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and arguments[2] & WRITING):
            path = arguments[0]
            name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else "/dev/"
            # shutil.rmtree names files relative to an open folder.
            inside = not os.path.isabs(name) or name.startswith(self.start)
            if inside and not name.startswith(self.without):
                self.count()

    def torn(self, write: Callable[..., None]) -> Callable[..., None]:
        def call(content: Any, path: Any) -> None:
            if not isinstance(path, Path) or str(path).startswith(self.without):
                return write(content, path)
            self.count()
            write(content, path)
            if self.left == 1:
                os.truncate(path, path.stat().st_size // 2)  # a change itself, before which the process dies
            else:
                self.left -= 1
            return None

        return call


def killed(action: Callable[[], object], folder: Path, moment: int, without: Path | None = None) -> bool:
    """Do something in a forked process that is killed before a change; return whether it came that far."""
    child = os.fork()
    if child == 0:
        try:
            Killer(folder, moment, without)
            action()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def every_kill(
    action: Callable[[Path], object],
    folder: Path,
    *,
    begin: Callable[[Path], object] = lambda folder: None,
    without: str = "",
    stride: int = 1,
) -> Iterator[Path]:
    """Yield a folder of its own for each change of `action(folder)`, as a kill before that change leaves it.

    `begin` fills the folder before. `without` is a folder below whose changes do not count, `stride` the distance
    between the changes chosen.
    """
    moment = 1
    while True:
        here = folder / str(moment)
        here.mkdir(parents=True)
        begin(here)
        apart = here / without if without else None
        if not killed(lambda at=here: action(at), here, moment, apart):  # type: ignore[misc]
            return
        yield here
        moment += stride
