"""`mgk data list | prepare | verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tyro

from mgk.cli.parsing import Action, function, named, option, read_options


def list_sets(root: Path | None = None) -> None:
    """List the data sets, and which of them are prepared.

    In Python: `mgk.data.names()`, `mgk.data.describe(name)`.

    Args:
        root: folder of the prepared data sets; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    import mgk.data

    where = root or mgk.data.root()
    folders = [path.name for path in mgk.data.prepared(where)]
    names = mgk.data.names()
    for name in names:
        # A prepared set lies in NAME or, with options of its own, in NAME-HASH.
        ready = any(f == name or (f.startswith(f"{name}-") and f not in names) for f in folders)
        print(f"{name:15}{'prepared  ' if ready else '          '}{mgk.data.describe(name).summary}")
    print(f"\nin {where}; prepare one with: mgk data prepare NAME [--source PATH]")


def prepare(name: str, program: str, words: list[str]) -> Action:
    """Prepare a data set for training.

    `mgk data list` shows the names, `mgk data prepare NAME --help` the options of one data set.

    In Python: `mgk.data.prepare("imdb", source="aclImdb")`.
    """
    import mgk.data

    described = mgk.data.describe(name)

    def type_of(value: object) -> Any:
        if isinstance(value, tuple):
            return tuple[tuple(type(item) for item in value)]  # type: ignore[misc]
        return int | None if value is None else type(value)

    options = {
        "source": option(Path | None, None, f"Folder or file with the raw data: {described.origin}."),
        "root": option(Path | None, None, "Folder to write to; $MGK_DATA or ~/.cache/mgk/data if not given."),
        **{key: option(type_of(value), value, "") for key, value in described.options.items()},
    }
    chosen = read_options(options, program, described.summary, words)
    return lambda: print(f"prepared in {mgk.data.prepare(name, **vars(chosen))}")


def verify(names: tyro.conf.Positional[tuple[str, ...]] = (), root: Path | None = None) -> None:
    """Read prepared data sets in full and compare them with the checksums in their manifests.

    In Python: `mgk.data.load(name, verify=True)`.

    Args:
        names: folders under the root to verify; all of them if none is named.
        root: folder of the prepared data sets; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    import mgk.data
    from mgk.data.store import read

    where = root or mgk.data.root()
    names = names or tuple(path.name for path in mgk.data.prepared(where))
    if not names:
        raise ValueError(f"--root: expected a folder with prepared data sets, found none in {where}")
    for name in names:
        found = read(where / name, f"mgk data prepare {name}", verify=True)
        counts = ", ".join(f"{split} {count:,}" for split, count in found.manifest["splits"].items())
        print(f"{name:15}intact: {counts}")


COMMANDS = {"list": function(list_sets), "prepare": named("NAME", prepare), "verify": function(verify)}
