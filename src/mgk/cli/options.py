"""Options of a command: from a function's signature and docstring, or from the fields of a configuration."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

POSITIONAL = "Positional"
T = TypeVar("T")
Positional = Annotated[T, POSITIONAL]
"""Type of a parameter whose value needs no name on the command line."""
REQUIRED = object()
ROOT = "run"  # group of the settings that belong to no part of a configuration
KINDS: dict[Any, tuple[str, str, str]] = {  # how a value is called in help texts, and in errors: one, several
    int: ("N", "a whole number", "whole numbers"),
    float: ("X", "a number", "numbers"),
    str: ("TEXT", "a text", "texts"),
    Path: ("PATH", "a path", "paths"),
}


class UsageError(ValueError):
    """The command line cannot be carried out as it stands."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option or positional argument."""

    path: tuple[str, ...]
    """Parameter, or for a setting the parameter and the fields that lead to it."""
    name: str
    """Name without dashes: data-root, model.head-dim."""
    type: Any
    default: Any
    text: str
    """What it is, as in the docstring."""
    positional: bool = False
    group: str = ""
    """Page of the help text that it stands on; "" is the first one."""

    @property
    def flag(self) -> str:
        """How users write it: --model.head-dim, or RUN."""
        return self.name.upper() if self.positional else f"--{self.name}"

    @property
    def metavar(self) -> str:
        """What stands for the value in help texts; "" for a switch."""
        if self.type is bool:
            return ""
        if get_origin(self.type) is Literal:
            return "|".join(map(str, get_args(self.type)))
        items, repeats = items_of(self.type)
        words = [KINDS[item][0] for item in items]
        return f"{words[0]} ..." if repeats else " ".join(words)

    @property
    def expected(self) -> str:
        """What a value must be, for errors."""
        if get_origin(self.type) is Literal:
            return f"one of {', '.join(map(str, get_args(self.type)))}"
        items, repeats = items_of(self.type)
        if repeats:
            return f"one or more {KINDS[items[0]][2]}"
        return KINDS[items[0]][1] if len(items) == 1 else f"{len(items)} {KINDS[items[0]][2]}"

    def value(self, words: Sequence[str]) -> Any:
        """Convert the words of a command line; raises `UsageError`."""
        items, repeats = items_of(self.type)
        if not words or (not repeats and len(words) != len(items)):
            got = f"{len(words)}: {' '.join(words)}" if words else "nothing"
            raise UsageError(f"{self.flag}: expected {self.expected}, got {got}")
        kinds = items * len(words) if repeats else items
        values = tuple(self._convert(kind, word) for kind, word in zip(kinds, words, strict=True))
        return values if get_origin(self.type) is tuple else values[0]

    def _convert(self, kind: Any, word: str) -> Any:
        if get_origin(kind) is Literal:
            for choice in get_args(kind):
                if word == str(choice):
                    return choice
        else:
            try:
                return kind(word)
            except ValueError:
                pass
        note = NOTES.get(word, "") if self.name == "device" else ""
        raise UsageError(f"{self.flag}: expected {self.expected}, got {word!r}{note}")


NOTES = {
    "mps": ": Apple GPUs have no fused kernel of mixture attention, only the dense formula, which keeps every pair of "
    "positions in memory; use cpu, which has compiled kernels"
}


def items_of(kind: Any) -> tuple[tuple[Any, ...], bool]:
    """Return the types of the values that belong to an option, and whether the only one may be repeated."""
    if get_origin(kind) is not tuple:
        return (kind,), False
    items = get_args(kind)
    return ((items[0],), True) if items[1:] == (...,) else (items, False)


def plain_type(hint: Any) -> tuple[Any, bool]:
    """Return a type without `| None` and annotations, and whether it is marked as positional."""
    positional = False
    if get_origin(hint) is Annotated:
        positional = POSITIONAL in hint.__metadata__
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (option for option in get_args(hint) if option is not type(None))
    return hint, positional


def options_of(run: Callable[..., Any], defaults: Mapping[str, Any]) -> list[Option]:
    """Return the options of a function; `defaults` replace its own defaults.

    A parameter without a default, or marked as `Positional`, is a positional argument. A parameter whose default is a
    configuration becomes one option per field.
    """
    hints, texts = get_type_hints(run, include_extras=True), documented_arguments(run)
    found: list[Option] = []
    settings: list[Option] = []
    for name, parameter in inspect.signature(run).parameters.items():
        default = defaults.get(name, REQUIRED if parameter.default is parameter.empty else parameter.default)
        if dataclasses.is_dataclass(default):
            settings += fields_of(default, (name,), "")
            continue
        kind, positional = plain_type(hints[name])
        text = texts.get(name, "")
        found.append(Option((name,), flag_name(name), kind, default, text, positional or default is REQUIRED))
    return found + settings


def fields_of(config: Any, path: tuple[str, ...], prefix: str) -> Iterator[Option]:
    """Yield the fields of a configuration, and of those inside it."""
    owner: Any = type(config)
    hints, texts = get_type_hints(owner, include_extras=True), documented_fields(owner)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}{flag_name(field.name)}"
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, (*path, field.name), f"{name}.")
        else:
            kind, text = plain_type(hints[field.name])[0], texts.get(field.name, "")
            yield Option((*path, field.name), name, kind, value, text, group=prefix.rstrip(".") or ROOT)


def flag_name(name: str) -> str:
    """The name of a parameter on the command line."""
    return name.rstrip("_").replace("_", "-")


def documented_arguments(run: Callable[..., Any]) -> dict[str, str]:
    """Return the text of each argument under "Args:" in the docstring of a function."""
    _, _, block = (inspect.getdoc(run) or "").partition("\nArgs:\n")
    parts = re.split(r"^(\w+): ", textwrap.dedent(block.partition("\n\n")[0]), flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}


@cache
def documented_fields(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass and of the classes that it inherits from."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def replaced(config: T, changes: Mapping[tuple[str, ...], Any], prefix: str = "--") -> T:
    """Return a configuration with some fields changed, by their paths; an error names the option."""
    direct: dict[str, Any] = {path[0]: value for path, value in changes.items() if len(path) == 1}
    for group in dict.fromkeys(path[0] for path in changes if len(path) > 1):
        inner = {path[1:]: value for path, value in changes.items() if path[0] == group and len(path) > 1}
        direct[group] = replaced(getattr(config, group), inner, f"{prefix}{flag_name(group)}.")
    try:
        return dataclasses.replace(config, **direct)  # type: ignore[type-var]
    except (ValueError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        name, colon, rest = str(error).partition(":")
        known = colon and name.split(".")[0] in {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
        raise UsageError(f"{prefix}{flag_name(name)}:{rest}" if known else str(error)) from None
