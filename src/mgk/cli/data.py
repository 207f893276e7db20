"""`mgk data list | prepare | verify`."""

from __future__ import annotations

import functools
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

import mgk.data
from mgk.cli.parsing import Action, function, named, one_line_errors


def list_sets(root: Path | None = None) -> None:
    """List the data sets, and which of them are prepared.

    In Python: `mgk.data.names()`, `mgk.data.describe(name)`.

    Args:
        root: folder of the prepared data sets; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    where = root or mgk.data.root()
    folders = [path.name for path in mgk.data.prepared(where)]
    names = mgk.data.names()
    for name in names:
        # A prepared set lies in NAME or, with options of its own, in NAME-HASH.
        ready = any(f == name or (f.startswith(f"{name}-") and f not in names) for f in folders)
        print(f"{name:15}{'prepared  ' if ready else '          '}{mgk.data.describe(name).summary}")
    print(f"\nin {where}; prepare one with: mgk data prepare NAME [--source PATH]")


def prepare(name: str, **options: Any) -> None:
    """Prepare a data set for training.

    `mgk data list` shows the names, `mgk data prepare NAME --help` the options of one data set.

    In Python: `mgk.data.prepare("imdb", source="aclImdb")`.
    """
    print(f"prepared in {mgk.data.prepare(name, **options)}")


def parse_prepare(name: str, program: str, words: list[str]) -> Action:
    """Parse the options of one data set, which its description lists with their defaults."""
    described = mgk.data.describe(name)
    if words and not words[0].startswith("-"):  # mgk data prepare text FILE
        words = ["--source", *words]

    def type_of(value: object) -> Any:
        if isinstance(value, tuple):
            return tuple[tuple(type(item) for item in value)]  # type: ignore[misc]
        return int | None if value is None else type(value)

    def path(text: str) -> Any:
        return Annotated[Path | None, tyro.conf.arg(help=text)]

    fields: list[tuple[str, Any, Any]] = [
        ("source", path(f"Folder or file with the raw data: {described.origin}."), None),
        ("root", path("Folder to write to; $MGK_DATA or ~/.cache/mgk/data if not given."), None),
        *((option, type_of(default), default) for option, default in described.options.items()),
    ]
    options: Any = make_dataclass("Options", [(name, type_, field(default=default)) for name, type_, default in fields])
    with one_line_errors():
        chosen = tyro.cli(options, prog=program, description=described.summary, args=words)
    return functools.partial(prepare, name, **vars(chosen))


def verify(names: tyro.conf.Positional[tuple[str, ...]] = (), root: Path | None = None) -> None:
    """Read prepared data sets in full and compare them with the checksums in their manifests.

    In Python: `mgk.data.verify(folder)`.

    Args:
        names: folders under the root to verify; all of them if none is named.
        root: folder of the prepared data sets; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    where = root or mgk.data.root()
    names = names or tuple(path.name for path in mgk.data.prepared(where))
    if not names:
        raise ValueError(f"--root: expected a folder with prepared data sets, found none in {where}")
    for name in names:
        found = mgk.data.verify(where / name)
        counts = ", ".join(f"{split} {count:,}" for split, count in found.manifest["splits"].items())
        print(f"{name:15}intact: {counts}")


COMMANDS = {
    "list": function(list_sets),
    "prepare": named("NAME", prepare, parse_prepare),
    "verify": function(verify),
}
