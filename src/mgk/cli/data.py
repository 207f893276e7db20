"""`mgk data list | prepare | verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mgk.data
from mgk.cli.options import Option
from mgk.cli.parsing import Action, Positional, UsageError, function, named, near, read

ROOT_TEXT = "Folder of the prepared data sets; $MGK_DATA or ~/.cache/mgk/data if not given."
TEXTS = {
    "arguments": "Most arguments of an operator.",
    "bpe": "Train a tokenizer of this many tokens and use it; 0 for none.",
    "depth": "Deepest nesting of operators.",
    "held_out": "Examples or articles kept out of the training split.",
    "lengths": "Shortest and longest expression, in symbols.",
    "limit": "Keep at most this many examples, or tokens of a text, per split.",
    "max_length": "Cut longer texts to this many bytes.",
    "max_vocabulary": "Keep at most this many words.",
    "min_count": "Replace words that occur less often by <unk>.",
    "seed": "Seed of what is drawn at random.",
    "shares": "Shares of the dev and test splits.",
    "sizes": "Examples of the splits train, dev and test.",
    "title": "Name of the text, if you prepare several.",
}
"""What each option of a data set means."""


def list_sets(data_root: Path | None = None) -> None:
    """List the data sets, and which of them are prepared.

    In Python: `mgk.data.names()`, `mgk.data.describe(name)`.

    Args:
        data_root: folder of the prepared data sets; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    where = data_root or mgk.data.root()
    folders = [path.name for path in mgk.data.prepared(where)]
    names = mgk.data.names()
    for name in names:
        # A prepared set lies in NAME or, with options of its own, in NAME-HASH.
        ready = any(f == name or (f.startswith(f"{name}-") and f not in names) for f in folders)
        print(f"{name:15}{'prepared  ' if ready else '          '}{mgk.data.describe(name).summary}")
    print(f"\nin {where}; prepare one with: mgk data prepare NAME [--source PATH]")


def prepare(name: str, source: Path | None = None, data_root: Path | None = None, **options: Any) -> None:
    """Prepare a data set for training: mgk data prepare NAME [SOURCE]

    `mgk data prepare NAME --help` shows the options of one data set. For a text of your own: mgk data prepare text FILE

    In Python: `mgk.data.prepare("imdb", source="aclImdb")`.
    """
    print(f"prepared in {mgk.data.prepare(name, source=source, root=data_root, **options)}")


def parse_prepare(name: str, program: str, words: list[str]) -> Action:
    """Parse the options of one data set, which its description lists with their defaults."""
    if name not in mgk.data.names():
        known = mgk.data.names()
        raise UsageError(f"NAME: expected one of {', '.join(known)}, got {name!r}{near(name, known)}")
    described = mgk.data.describe(name)
    if words and not words[0].startswith("-"):  # mgk data prepare text FILE
        words = ["--source", *words]

    def type_of(value: object) -> Any:
        if isinstance(value, tuple):
            return tuple[tuple(type(item) for item in value)]  # type: ignore[misc]
        return int if value is None else type(value)

    options = [
        Option(("source",), "source", Path, None, f"Folder or file with the raw data: {described.origin}."),
        Option(("data_root",), "data-root", Path, None, ROOT_TEXT),
        *(
            Option((option,), option.replace("_", "-"), type_of(default), default, TEXTS[option])
            for option, default in described.options.items()
        ),
    ]
    return read(prepare, program, words, options, f"{described.summary}.", {"name": name})


def verify(names: Positional[tuple[str, ...]] = (), data_root: Path | None = None) -> None:
    """Read prepared data sets in full and compare them with the checksums in their manifests.

    In Python: `mgk.data.verify(folder)`.

    Args:
        names: folders under the root to verify; all of them if none is named.
        data_root: folder of the prepared data sets; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    where = data_root or mgk.data.root()
    names = names or tuple(path.name for path in mgk.data.prepared(where))
    if not names:
        raise ValueError(f"--data-root: expected a folder with prepared data sets, found none in {where}")
    for name in names:
        found = mgk.data.verify(where / name)
        counts = ", ".join(f"{split} {count:,}" for split, count in found.manifest["splits"].items())
        print(f"{name:15}intact: {counts}")


COMMANDS = {
    "list": function(list_sets),
    "prepare": named(
        "NAME", prepare, parse_prepare, lambda: {name: mgk.data.describe(name).summary for name in mgk.data.names()}
    ),
    "verify": function(verify),
}
