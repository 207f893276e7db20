"""Prepared sets on disk: a folder of arrays, and a manifest with their meaning and checksums.

A set is written to a temporary folder, under a lock, and renamed when everything is on disk. So a folder with the name
of a set is always a complete set.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mgk.data.splits import KINDS, AnySplit, Array, Sequences, blocks, join
from mgk.files import beside, checksum, holder, new_folder, seal, tidy, write_text
from mgk.files import locked as file_lock

FORMAT = 2
READABLE = (1, FORMAT)  # a manifest of format 1 has no checksum of its own
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.txt"
TOKENIZER = "tokenizer.json"
PLAIN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_.-]+")  # names of files in a set


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
    tokenizer: str | None = None
    """A trained tokenizer, as JSON of the library `tokenizers`."""


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

    @property
    def tokenizer(self) -> Path:
        """The file of the tokenizer that was trained on a text."""
        return self.path / TOKENIZER

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
            file.split(".")[1]: _open_array(self.path / file, facts)
            for file, facts in self.manifest["files"].items()
            if file.startswith(f"{name}.")
        }
        try:
            return KINDS[self.manifest["kind"]].restore(arrays, self.manifest["facts"])
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{self.path}: expected the arrays of a set of {self.manifest['kind']}, got {error}"
            ) from None


def read(folder: Path, advice: str, *, verify: bool = False) -> Prepared:
    """Open a prepared set and compare its files with the sizes and checksums in its manifest.

    A checksum is computed once per process, unless the file changes; with `verify`, every time.

    Args:
        folder: folder of the set.
        advice: the command that prepares it, for error messages.
        verify: compute all checksums now.
    """
    if not folder.is_dir():
        restore(folder)
    if not folder.is_dir():
        raise DataError(f"{folder.name} is not prepared in {folder.parent}; type: {advice}")
    manifest = _manifest(folder / MANIFEST, f"type: {advice}")
    for name, expected in manifest["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            found = "missing" if size is None else f"{size} bytes"
            raise DataError(f"{path} is damaged: expected {expected['bytes']} bytes, found {found}; type: {advice}")
        if not _intact(path, expected["sha256"], verify):
            raise DataError(f"{path} is damaged: its checksum differs from that in {MANIFEST}; type: {advice}")
    return Prepared(folder, manifest)


def _manifest(path: Path, again: str) -> dict[str, Any]:
    """Read a manifest and check every field that this package uses."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files, written = manifest["files"], manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}); {again}") from None
    if written not in READABLE:
        raise DataError(f"{path.parent} has format {written}, this version of mgk reads {FORMAT}; {again}")
    if written > 1 and manifest.get("sha256") != seal(manifest):
        raise DataError(f"{path} is damaged: its own checksum differs; {again}")
    types = {"name": str, "version": int, "kind": str, "splits": dict, "facts": dict, "files": dict}
    wrong = [name for name, type_ in types.items() if not isinstance(manifest.get(name), type_)]
    if wrong or manifest["kind"] not in KINDS:
        raise DataError(f"{path} is damaged: {(wrong or ['kind'])[0]} is missing or wrong; {again}")
    for name, facts in files.items():
        if not PLAIN.fullmatch(name) or not isinstance(facts, dict) or not {"bytes", "sha256"} <= facts.keys():
            raise DataError(f"{path} is damaged: expected files of this folder with sizes, got {name!r}; {again}")
    return manifest  # type: ignore[no-any-return]


_read_before: set[tuple[Any, ...]] = set()
"""Files whose checksum was right when this process computed it."""


def _intact(path: Path, sha256: str, verify: bool) -> bool:
    stat = path.stat()
    key = (path.absolute(), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, sha256)
    if verify or key not in _read_before:
        if checksum(path)["sha256"] != sha256:
            return False
        _read_before.add(key)
    return True


def _open_array(path: Path, facts: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Map an array into memory. One of Python objects is refused: reading it could run code."""
    try:
        array: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        found = {"shape": list(array.shape), "dtype": str(array.dtype)}
    except (OSError, ValueError, SyntaxError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{path}: expected an array, got {str(error).splitlines()[0]}") from None
    wanted = {name: facts.get(name) for name in found}
    if found != wanted:
        raise DataError(f"{path}: expected {wanted} as in {MANIFEST}, got {found}")
    return array


def write(folder: Path, built: Built, manifest: dict[str, Any]) -> None:
    """Replace `folder` by the set, atomically; the manifest is written last. Call it inside `locked(folder)`."""
    try:
        with new_folder(folder) as unfinished:
            files: dict[str, dict[str, Any]] = {}
            for split, examples in built.splits.items():
                for array, values in examples.arrays().items():
                    path = unfinished / f"{split}.{array}.npy"
                    save_array(path, values)
                    files[path.name] = checksum(path) | {"shape": list(values.shape), "dtype": str(values.dtype)}
            words = None if built.words is None else "".join(f"{word}\n" for word in built.words)
            for name, text in ((VOCABULARY, words), (TOKENIZER, built.tokenizer)):
                if text is not None:
                    (unfinished / name).write_bytes(text.encode())
                    files[name] = checksum(unfinished / name)
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
            content = json.loads(json.dumps(content))  # what a reader finds: lists instead of tuples
            write_text(unfinished / MANIFEST, json.dumps(content | {"sha256": seal(content)}, indent=2))
    except OSError as error:
        raise unwritable(folder, error) from None


def save_array(path: Path, values: Array) -> None:
    """Write an array as `np.save` does, but in parts: a long text is not read into memory."""
    header = {"descr": np.lib.format.dtype_to_descr(values.dtype), "fortran_order": False, "shape": values.shape}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in blocks(values):
            np.ascontiguousarray(part).tofile(file)


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
            raise unwritable(folder, error) from None
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


def unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"{folder} could not be written ({error.strerror}); free disk space or set MGK_DATA to another folder"
    )
