"""Find and read the raw files of a set: plain or compressed, in folders or archives."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

import numpy as np

from mgk.data.splits import BLOCK, Array
from mgk.data.store import DataError, unwritable
from mgk.files import checksum

COMPRESSED = ("", ".xz", ".gz", ".bz2", ".zip")
LARGEST = 1 << 30  # bytes of a file in a tar archive: one of the sets here has 32 MB
DAMAGED = (
    EOFError,
    lzma.LZMAError,
    gzip.BadGzipFile,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    UnicodeDecodeError,
)


class Source:
    """The raw files of one set. Opens compressed files, and records the checksum of each file that is read.

    `given` is the folder or file that the user named; by default $MGK_RAW and `<root>/raw` are searched. In each of
    them the files may be directly inside or in one of `folders`, the usual names of the unpacked set.
    """

    def __init__(self, name: str, given: Path | None, root: Path, folders: tuple[str, ...], advice: str) -> None:
        self.name, self.given, self.root, self.advice = name, given, root, advice
        self.hub = given == Path("hub") and not given.exists()
        if given is not None and not self.hub and not given.exists():
            raise DataError(f"source: {given} does not exist; {advice}")
        environment = os.environ.get("MGK_RAW")
        starts = [Path(environment).expanduser()] if environment else []
        starts = [given] if given is not None else [*starts, root / "raw"]
        self.places = [place for start in starts for place in (*(start / f for f in folders), start) if place.exists()]
        self.searched = ", ".join(map(str, starts))
        self.used: dict[str, dict[str, Any]] = {}
        self.opened: set[Path] = set()

    def find(self, *patterns: str, folder: bool = False) -> Path | None:
        """Return the first file (or folder) that matches a pattern, also with the suffix of a compressed file."""
        for place in self.places:
            for pattern in (f"{pattern}{ending}" for pattern in patterns for ending in COMPRESSED):
                found = [place] if place.is_file() and place.match(pattern) else sorted(place.glob(pattern))
                for path in found:
                    if path.is_dir() if folder else path.is_file():
                        return path
        return None

    def place(self, inside: str) -> Path | None:
        """Return the first searched folder that contains `inside`, for users who name the unpacked folder itself."""
        return next((place for place in self.places if (place / inside).exists()), None)

    def require(self, pattern: str) -> Path:
        return self.find(pattern) or self.missing(pattern)

    def missing(self, what: str) -> NoReturn:
        raise DataError(f"{self.name}: no {what} in {self.searched}; {self.advice}")

    def open(self, path: Path) -> IO[bytes]:
        """Open a file, decompressed, and record its checksum for the manifest."""
        if path not in self.opened:
            self.opened.add(path)
            self.used[path.name] = checksum(path)
        if path.suffix == ".zip":
            return self.zipped(path)
        openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
        return openers.get(path.suffix, open)(path, "rb")  # type: ignore[no-any-return]

    def zipped(self, path: Path) -> IO[bytes]:
        """Open the first file of a zip archive."""
        archive = zipfile.ZipFile(path)
        names = [self.inside(path, each.filename) for each in archive.infolist() if not each.is_dir()]
        try:
            return archive.open(names[0])
        except (IndexError, RuntimeError) as error:  # there is none, it is encrypted, or compressed in another way
            self.refuse(path, f"its first file cannot be read ({error})")

    def inside(self, path: Path, name: str) -> str:
        """Return the name of a member of an archive; raise an error if it points to another folder."""
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            self.refuse(path, f"expected names inside the archive, got {name!r}")
        return name

    def refuse(self, path: Path, why: str) -> NoReturn:
        raise DataError(f"{path}: {why}; {self.advice}")

    def text(self, path: Path) -> IO[str]:
        return io.TextIOWrapper(self.open(path), encoding="utf-8", newline="\n")

    def json_lines(self, path: Path, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the objects of some lines."""
        with self.text(path) as lines:
            for number, line in islice(enumerate(lines, 1), start, stop):
                try:
                    yield json.loads(line)
                except ValueError:
                    raise DataError(f"{path}, line {number}: expected one JSON object; {self.advice}") from None

    def spool(self, numbers: Iterable[int] | Iterable[bytes], dtype: type[np.generic]) -> Array:
        """Return numbers, or bytes, as an array in a temporary file without a name, mapped into memory.

        So a text that is longer than the memory can be prepared. The file is on the disk of the prepared sets.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.root) as file:
            for part in _parts(iter(numbers), dtype):
                try:
                    file.write(part)
                    file.flush()
                except OSError as error:
                    raise unwritable(self.root, error) from None
            return np.memmap(file, dtype, "r") if file.tell() else np.zeros(0, dtype)

    def hub_rows(self, *names: str, split: str) -> Iterable[dict[str, Any]]:
        """Return a split of a set on the Hugging Face hub."""
        try:
            import datasets  # type: ignore[import-not-found]
        except ImportError:
            raise DataError(f"{self.name}: --source hub needs `datasets`; type: pip install 'mgk[data]'") from None
        rows = datasets.load_dataset(*names, split=split)
        self.used["/".join(("hub", *names, split))] = {"fingerprint": getattr(rows, "_fingerprint", None)}
        return rows  # type: ignore[no-any-return]

    def members(self, path: Path, keep: str) -> Iterator[tuple[str, bytes]]:
        """Yield path and content of the files in a folder or tar archive whose path matches the pattern `keep`."""
        wanted = re.compile(keep)
        if path.is_file():
            self.used[path.name] = checksum(path)
            with tarfile.open(path) as archive:
                for member in archive:
                    if not wanted.search(self.inside(path, member.name)) or member.isdir():
                        continue
                    if not member.isfile():
                        self.refuse(path, f"{member.name}: expected a file, got a link or a device")
                    if member.size > LARGEST:
                        self.refuse(path, f"{member.name}: expected at most {LARGEST} bytes, got {member.size}")
                    file = archive.extractfile(member)
                    assert file is not None  # see above
                    yield member.name, b"".join(iter(partial(file.read, BLOCK), b""))  # its size may be a lie
            return
        total, size = hashlib.sha256(), 0
        for name in sorted(each.relative_to(path.parent).as_posix() for each in path.rglob("*") if each.is_file()):
            if wanted.search(name):
                content = (path.parent / name).read_bytes()
                total.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
                size += len(content)
                yield name, content
        self.used[path.name] = {"bytes": size, "sha256": total.hexdigest()}


def _parts(numbers: Iterator[Any], dtype: type[np.generic]) -> Iterator[Any]:
    """Yield bytes as they are, and numbers in arrays."""
    first = next(numbers, None)
    if isinstance(first, bytes):
        yield first
        yield from numbers
    elif first is not None:
        numbers = chain((first,), numbers)
        while len(part := np.fromiter(islice(numbers, BLOCK), dtype)):
            yield part
