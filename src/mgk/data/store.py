"""Prepared sets on disk: a folder of arrays, and a manifest with their meaning and checksums.

A set is written to a temporary folder, under a lock, and renamed when everything is on disk. So a folder with the name
of a set is always a complete set.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mgk.data.splits import KINDS, AnySplit, Sequences, join
from mgk.files import beside, checksum, holder, new_folder, tidy, write_text
from mgk.files import locked as file_lock

FORMAT = 1
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.txt"


class DataError(ValueError):
    """A data set or its source is missing or damaged; the message says what to do."""


def root() -> Path:
    """Return the default folder of prepared sets: $MGK_DATA, or ~/.cache/mgk/data."""
    return Path(os.environ.get("MGK_DATA") or "~/.cache/mgk/data").expanduser()


@dataclass(frozen=True)
class Built:
    """A set in memory, before it is written."""

    splits: dict[str, AnySplit]
    facts: dict[str, Any]
    """What a reader needs besides the arrays: vocabulary, classes, shift, mean, std."""
    words: list[str] | None = None
    """The vocabulary, in the order of token ids."""
    origin: dict[str, Any] = field(default_factory=dict)
    """Its sources: names, sizes and checksums of files."""


@dataclass(frozen=True)
class Prepared:
    """A set on disk. `split` maps its arrays into memory, without reading them."""

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
        """One checksum over all files: two sets with the same digest hold the same data."""
        return hashlib.sha256(json.dumps(self.manifest["files"], sort_keys=True).encode()).hexdigest()

    @property
    def words(self) -> list[str]:
        """The vocabulary of a word-level text, in the order of token ids."""
        return (self.path / VOCABULARY).read_text(encoding="utf-8").split("\n")[:-1]

    def split(self, name: str) -> AnySplit:
        """Return the split train, dev or test; `train+dev` joins two, for protocols without a dev set."""
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
    """Open a prepared set and check its file sizes; with `verify`, also the checksums.

    `advice` is the command that prepares it, for error messages.
    """
    if not folder.is_dir():
        restore(folder)
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
        if verify and checksum(path)["sha256"] != expected["sha256"]:
            raise DataError(f"{path} is damaged: its checksum differs from that in {MANIFEST}; {again}")
    return Prepared(folder, manifest)


def write(folder: Path, built: Built, manifest: dict[str, Any]) -> None:
    """Replace `folder` by the set, atomically; the manifest is written last. Call it inside `locked(folder)`."""
    try:
        with new_folder(folder) as unfinished:
            files: dict[str, dict[str, Any]] = {}
            for split, examples in built.splits.items():
                for array, values in examples.arrays().items():
                    path = unfinished / f"{split}.{array}.npy"
                    np.save(path, values, allow_pickle=False)
                    files[path.name] = checksum(path) | {"shape": list(values.shape), "dtype": str(values.dtype)}
            if built.words is not None:
                path = unfinished / VOCABULARY
                path.write_bytes("".join(f"{word}\n" for word in built.words).encode())
                files[VOCABULARY] = checksum(path)
            kind = next(kind for kind, cls in KINDS.items() if isinstance(built.splits["train"], cls))
            content = {
                "format": FORMAT,
                **manifest,
                "kind": kind,
                "splits": {name: len(split) for name, split in built.splits.items()},
                "facts": built.facts,
                "origin": built.origin,
                "files": files,
            }
            write_text(unfinished / MANIFEST, json.dumps(content, indent=2))
    except OSError as error:
        raise _unwritable(folder, error) from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock on a set, so that one process prepares it at a time; restore the set of a killed preparation."""
    lock = beside(folder, "lock")
    with ExitStack() as stack:
        try:
            if not stack.enter_context(file_lock(lock, wait=False)):
                print(f"{folder}: waiting for {holder(lock)}, which prepares it", file=sys.stderr, flush=True)
                stack.enter_context(file_lock(lock))
            tidy(folder.parent, folder.name)
        except OSError as error:
            raise _unwritable(folder, error) from None
        yield


def restore(folder: Path) -> None:
    """Put a set back in its place if a preparation was killed while it replaced the set."""
    if beside(folder, "old").exists():
        with file_lock(beside(folder, "lock"), wait=False) as ours:
            if ours:
                tidy(folder.parent, folder.name)


def prepared(folder: str | Path | None = None) -> list[Path]:
    """Return the folders of all sets prepared under `folder`, by default under `root()`."""
    base = Path(folder).expanduser() if folder is not None else root()
    return sorted(path.parent for path in base.glob(f"[!.]*/{MANIFEST}"))


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"{folder} could not be written ({error.strerror}); free disk space or set MGK_DATA to another folder"
    )
