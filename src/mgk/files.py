"""Atomic file writing: a reader finds the old content or the new, never a part of it.

Content is written under a temporary name, flushed to disk and renamed. Temporary names begin with a dot and end with
".partial" or ".old", so that `tidy` can finish or undo what a killed process left.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a file to write, which replaces `path` once it is on disk; on an error nothing changes."""
    temporary = beside(path, f"{os.getpid()}.partial")
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def write_json(path: Path, values: Any) -> None:
    write_text(path, json.dumps(values, indent=1) + "\n")


def read_json(path: Path, advice: str = "") -> dict[str, Any]:
    """Read a JSON object; an error names the file, and `advice` follows."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read ({reason}){advice}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}{advice}")
    return values


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which replaces `path` once it is on disk; on an error nothing changes.

    Only one process may write `path` at a time. A process killed between the two renames leaves the previous content
    in `beside(path, "old")`, from which `tidy` restores it.
    """
    temporary, old = beside(path, "partial"), beside(path, "old")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    try:
        temporary.mkdir(parents=True)
        yield temporary
        put_in_place(temporary, path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, path: Path) -> None:
    """Flush a folder to disk, then rename it to `path`; a previous content becomes `beside(path, "old")`."""
    for file in temporary.rglob("*"):
        flush(file)
    flush(temporary)
    if path.exists():
        old = beside(path, "old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(temporary, path)
    flush(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder, which loses its name first: no process ever finds a part of it there."""
    temporary = beside(path, "partial")
    shutil.rmtree(temporary, ignore_errors=True)
    os.rename(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def tidy(folder: Path, name: str = "*") -> None:
    """Finish or undo what killed processes left in a folder; with `name`, only what belongs to that file or folder.

    Call it only while no other process writes there: see `locked`.
    """
    name = name if name == "*" else glob.escape(name)
    for old in folder.glob(f".{name}.old"):
        original = old.with_name(old.name[1:].removesuffix(".old"))
        if not original.exists():  # killed between the two renames of `put_in_place`
            os.rename(old, original)
    for left in [*folder.glob(f".{name}.*partial"), *folder.glob(f".{name}.old")]:
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def beside(path: Path, ending: str) -> Path:
    """A hidden path in the same folder."""
    return path.with_name(f".{path.name}.{ending}")


def point(link: Path, target: Path) -> None:
    """Make a symbolic link point to `target`, atomically."""
    text = os.path.relpath(target, link.parent)
    if link.is_symlink() and os.readlink(link) == text:
        return
    temporary = beside(link, "partial")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(text, target_is_directory=True)
    os.replace(temporary, link)
    flush(link.parent)


def flush(path: Path) -> None:
    """Wait until a file or the entries of a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_held: set[int] = set()  # descriptors of the locks of this process


def _release_in_child() -> None:
    """A forked process must not keep the lock of its parent, which may be killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def locked(path: Path, *, wait: bool = True, remove: bool = False) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is created if missing and says who holds it; see `holder`.

    Yields False, without the lock, if another process holds it and `wait` is False. The operating system releases the
    lock when the process ends, however it ends. With `remove` the file is removed at the end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(path, wait)
    if descriptor is None:
        yield False
        return
    _held.add(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield True
    finally:
        if descriptor in _held:  # not in a forked child, which has closed it
            if remove:
                path.unlink(missing_ok=True)
            _held.remove(descriptor)
            os.close(descriptor)


def _lock(path: Path, wait: bool) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _same(path, descriptor):
                return descriptor
            os.close(descriptor)  # its holder has removed it meanwhile
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise OSError(error.errno, f"{path}: cannot be locked ({error.strerror})") from None


def _same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def holder(path: Path) -> str:
    """Who holds a lock, for a message: "process 12 on node3"."""
    try:
        return path.read_text(errors="replace").strip() or "another process"
    except OSError:  # it has just ended
        return "another process"


def checksum(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def seal(values: dict[str, Any]) -> str:
    """Return the checksum of a JSON object, which it may itself hold as "sha256"."""
    content = {name: value for name, value in values.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file, without lines that are broken: a crash may have cut one."""
    found = map(parse_line, path.read_bytes().splitlines()) if path.exists() else ()
    return [line for line in found if line is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line of JSON; None if it is not an object."""
    try:
        value = json.loads(line)
    except ValueError:  # also what is not UTF-8
        return None
    return value if isinstance(value, dict) else None
