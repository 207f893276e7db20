"""Atomic file writing: a reader finds the old content or the new, never a part of it.

Content is written under a temporary name, flushed to disk and renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically."""
    temporary = beside(path, str(os.getpid()))
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


def read_json(path: Path) -> Any:
    """Read a JSON file; one that is damaged is a ValueError that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got {' '.join(str(error).split())}") from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which replaces `path` once it is on disk; on an error nothing changes.

    Only one process may write `path` at a time. A process killed between the two renames leaves the previous content
    in `beside(path, "old")`.
    """
    temporary, old = beside(path, "partial"), beside(path, "old")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            flush(file)
        flush(temporary)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.rename(path, old)
        os.rename(temporary, path)
        flush(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def beside(path: Path, ending: str) -> Path:
    """A hidden path in the same folder."""
    return path.with_name(f".{path.name}.{ending}")


def point(link: Path, target: Path) -> None:
    """Make a symbolic link point to `target`, atomically."""
    temporary = beside(link, str(os.getpid()))
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    os.replace(temporary, link)
    flush(link.parent)


def flush(path: Path) -> None:
    """Wait until a file or the entries of a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is created if missing.

    Yields False, without the lock, if another process holds it and `wait` is False. The operating system releases the
    lock when the process ends, however it ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def checksum(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file up to the first broken line: a crash may have cut the last one."""
    result = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                result.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return result
