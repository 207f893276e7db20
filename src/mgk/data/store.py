"""Prepared sets on disk: a folder of arrays and a manifest that says what they are and what their bytes must be.

A set is written into a folder beside its own, under a lock, and renamed when everything is on disk; the manifest is
written last. Whatever stops it, a folder with the set's own name is a whole set.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mgk.data.splits import KINDS, AnySplit, Sequences, join

FORMAT = 1
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.txt"


class DataError(ValueError):
    """A data set or its source is missing, unfinished or damaged; the message says what to do."""


def root() -> Path:
    """Where prepared sets are: $MGK_DATA, or ~/.cache/mgk/data."""
    return Path(os.environ.get("MGK_DATA") or "~/.cache/mgk/data").expanduser()


@dataclass(frozen=True)
class Built:
    """What the preparation of a set makes, before it is on disk."""

    splits: dict[str, AnySplit]
    facts: dict[str, Any]
    """What a reader must know beside the arrays: vocabulary, classes, shift, mean, std."""
    words: list[str] | None = None
    """The vocabulary in the order of its numbers."""
    origin: dict[str, Any] = field(default_factory=dict)
    """What it was made from: the names, sizes and sums of files."""


@dataclass(frozen=True)
class Prepared:
    """A set on disk. Arrays are mapped into memory when a split is asked for, and read as they are used."""

    path: Path
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest["splits"])

    @property
    def digest(self) -> str:
        """One sum over all files: two sets with the same digest hold the same data."""
        return hashlib.sha256(json.dumps(self.manifest["files"], sort_keys=True).encode()).hexdigest()

    @property
    def words(self) -> list[str]:
        """The vocabulary of a word-level text."""
        return (self.path / VOCABULARY).read_text(encoding="utf-8").split("\n")[:-1]

    def split(self, name: str) -> AnySplit:
        """train, dev or test; `train+dev` joins two where a protocol has no dev set of its own."""
        first, _, second = name.partition("+")
        if second:
            parts = [part for part in map(self.split, (first, second)) if isinstance(part, Sequences)]
            if len(parts) == 2:
                return join(*parts)
        if name not in self.splits:
            raise DataError(f"split: expected one of {', '.join(self.splits)} of {self.name}, got {name!r}")
        arrays = {
            file.split(".")[1]: np.load(self.path / file, mmap_mode="r")
            for file in self.manifest["files"]
            if file.startswith(f"{name}.")
        }
        return KINDS[self.manifest["kind"]].restore(arrays, self.manifest["facts"])


def read(folder: Path, advice: str, *, verify: bool = False) -> Prepared:
    """Open a prepared set; `advice` is the command that prepares it. Sizes are always checked, sums with `verify`."""
    if not folder.is_dir():
        raise DataError(f"{folder.name} is not prepared in {folder.parent}; type: {advice}")
    again = f"type: {advice}"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, written = manifest["files"], manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged ({type(error).__name__}); {again}") from None
    if written != FORMAT:
        raise DataError(f"{folder} has format {written}, this version of mgk reads {FORMAT}; {again}")
    for name, expected in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            found = "missing" if size is None else f"{size} bytes"
            raise DataError(f"{path} is damaged: expected {expected['bytes']} bytes, found {found}; {again}")
        if verify and sha256(path) != expected["sha256"]:
            raise DataError(f"{path} is damaged: its sum is not the one in {MANIFEST}; {again}")
    return Prepared(folder, manifest)


def write(folder: Path, built: Built, manifest: dict[str, Any]) -> None:
    """Replace `folder` by the set in one step. Call it inside `locked(folder)`."""
    unfinished, old = _beside(folder, "partial"), _beside(folder, "old")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a preparation that was killed: nobody else has the lock
    try:
        _fill(unfinished, built, manifest)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        unfinished.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _fill(folder: Path, built: Built, manifest: dict[str, Any]) -> None:
    """All files of a set, on disk when it returns; the manifest last."""
    folder.mkdir()
    files: dict[str, dict[str, Any]] = {}
    for split, examples in built.splits.items():
        for array, values in examples.arrays().items():
            path = folder / f"{split}.{array}.npy"
            _write(path, partial(np.save, arr=values, allow_pickle=False))
            files[path.name] = _sums(path) | {"shape": list(values.shape), "dtype": str(values.dtype)}
    if built.words is not None:
        text = "".join(f"{word}\n" for word in built.words)
        _write(folder / VOCABULARY, lambda file: file.write(text.encode()))
        files[VOCABULARY] = _sums(folder / VOCABULARY)
    whole = {
        "format": FORMAT,
        **manifest,
        "kind": next(kind for kind, cls in KINDS.items() if isinstance(built.splits["train"], cls)),
        "splits": {name: len(split) for name, split in built.splits.items()},
        "facts": built.facts,
        "origin": built.origin,
        "files": files,
    }
    _write(folder / MANIFEST, lambda file: file.write(json.dumps(whole, indent=2).encode()))
    _sync(folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One preparation of a set at a time; the lock goes with the process that holds it."""
    lock = _beside(folder, "lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise _unwritable(folder, error) from None
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not folder.exists() and _beside(folder, "old").exists():  # killed between two renames: the old one is whole
            _beside(folder, "old").rename(folder)
        yield


def prepared(folder: str | Path | None = None) -> list[Path]:
    """The folders of all sets prepared under `folder`, or under `root()`."""
    base = Path(folder).expanduser() if folder is not None else root()
    return sorted(path.parent for path in base.glob(f"[!.]*/{MANIFEST}"))


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(f"{folder} could not be written ({error.strerror}); make room or set MGK_DATA to another folder")


def _sums(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _beside(folder: Path, what: str) -> Path:
    return folder.parent / f".{folder.name}.{what}"


def _write(path: Path, content: Callable[[Any], object]) -> None:
    with open(path, "wb") as file:
        content(file)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
