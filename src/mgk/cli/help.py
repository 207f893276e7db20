"""Help texts: one line per option, and one screen per page. Settings that belong together have a page of their own."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, get_origin

from mgk.cli.options import REQUIRED, Option, UsageError

NARROW, WIDE = 80, 120
CHOICES = 18  # longer lists of choices stand in the description
ALL = "all"


def width() -> int:
    """Columns to write to."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, NARROW), WIDE)


def group_help(program: str, text: str, summaries: Mapping[str, str]) -> str:
    """Return the help text of a command that consists of others."""
    lines = [line for name, summary in summaries.items() for line in entry(name, summary, 9)]
    more = f"`{program} COMMAND --help` shows the options of a command."
    return "\n".join([f"usage: {program} COMMAND ...", "", text, "", *lines, "", more])


def command_help(program: str, text: str, options: Sequence[Option], common: Sequence[str] = (), page: str = "") -> str:
    """Return a page of the help text of a command.

    Args:
        program: the name of the command.
        text: what it does.
        options: all its options.
        common: names of settings to show on the first page, although they belong to a group.
        page: "" is the first page, a group its options, "all" everything, with longer descriptions.
    """
    groups = groups_of(options)
    if page:
        own = [option for option in options if not option.positional and page in (ALL, option.group)]
        return "\n".join([f"usage: {program} [OPTIONS], settings: {page}", "", *table(own, short=page != ALL)])
    arguments = [f"{o.flag} ..." if get_origin(o.type) is tuple else o.flag for o in options if o.positional]
    first = [option for option in options if not option.group or option.name in common]
    lines = [text_help(" ".join([program, *arguments, "[OPTIONS]"]), text), "", *table(first, short=bool(groups))]
    if groups:
        lines += ["", f"More settings: {program} --help {'|'.join([*groups, ALL])}"]
    return "\n".join(lines)


def named_help(usage: str, text: str, names: Mapping[str, str]) -> str:
    """Return the help text of a command whose options depend on a name, with a line about each."""
    left = max(map(len, names))
    return "\n".join([text_help(usage, text), "", *(entry(*each, left, lines=1)[0] for each in names.items())])


def text_help(usage: str, text: str) -> str:
    """Return the usage and the description of a command."""
    return "\n\n".join([f"usage: {usage}", *map(paragraph, text.split("\n\n"))])


def groups_of(options: Sequence[Option]) -> list[str]:
    """Return the groups of settings that have a page."""
    return list(dict.fromkeys(option.group for option in options if option.group))


def group_of_options(after: Sequence[str], options: Sequence[Option]) -> str:
    """Return the page that the word after --help asks for; "" for none."""
    groups = groups_of(options)
    if not after or after[0].startswith("-") or not groups:
        return ""
    if after[0] not in (*groups, ALL):
        raise UsageError(f"--help: expected one of {', '.join([*groups, ALL])}, got {after[0]!r}")
    return after[0]


def table(options: Sequence[Option], *, short: bool = False) -> list[str]:
    """Return the lines of some options; `short` cuts each description to the sentences that fit on one line."""
    names = [name_of(option) for option in options]
    left = max(map(len, names), default=0)
    return [
        line
        for name, option in zip(names, options, strict=True)
        for line in entry(name, description(option, width() - left - 4 if short else None), left)
    ]


def name_of(option: Option) -> str:
    """Return what users type for an option."""
    if option.positional:
        return option.flag
    if option.type is bool:
        return f"--{option.name}" if option.default is False else f"--[no-]{option.name}"
    return f"{option.flag} {option.metavar if len(option.metavar) <= CHOICES else 'NAME'}"


def description(option: Option, columns: int | None) -> str:
    """Return what an option is, its choices if they do not stand beside its name, and its default."""
    choices = option.metavar.replace("|", ", ") if len(option.metavar) > CHOICES else ""
    end = (f" ({choices})" if choices else "") + shown(option.default)
    text = option.text[:1].upper() + option.text[1:].rstrip(".")
    condition = text.startswith(("With ", "For "))  # what stands before the colon says little
    for mark in (". ", "; ", " (", *(() if condition else (": ", ", "))):
        if columns is None or len(text + end) <= columns:
            break
        text = text.partition(mark)[0]
    return text + end


def shown(default: Any) -> str:
    """Return a default as users would type it, in brackets; nothing for "not given"."""
    if default is REQUIRED or default is None or default is False or default in ("", ()):
        return ""
    if isinstance(default, tuple):
        return f" [{' '.join(map(str, default))}]"
    if isinstance(default, float):
        return f" [{default:g}]"
    return f" [{'on' if default is True else default}]"


def entry(name: str, text: str, left: int, lines: int | None = None) -> list[str]:
    """Return a name and its text side by side, on more lines if the text is long, but at most `lines`."""
    first, *more = textwrap.wrap(
        text, width() - left - 4, break_on_hyphens=False, max_lines=lines, placeholder=" ..."
    ) or [""]
    return [f"  {name:{left}}  {first}".rstrip(), *(f"{'':{left + 4}}{line}" for line in more)]


def paragraph(text: str) -> str:
    """Wrap a paragraph of a docstring; lines that are indented stay as they are."""
    if any(line.startswith(" ") for line in text.splitlines()):
        return text
    return textwrap.fill(" ".join(text.split()), width(), break_on_hyphens=False, break_long_words=False)
