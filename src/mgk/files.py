"""Files that are whole or not there: written under another name, flushed to the disk, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def write_json(path: Path, values: Any) -> None:
    write_text(path, json.dumps(values, indent=1) + "\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which appears as `path` when it is full and on the disk, and leaves nothing if it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            flush(file)
        flush(temporary)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temporary, path)
        flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """Let a symbolic link beside it point to `target`, in one step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    os.replace(temporary, link)
    flush(link.parent)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file up to the first broken line: a crash may have cut the last one."""
    result = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                result.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return result
