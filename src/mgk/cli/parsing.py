"""From the words of a command line to a function call that is ready to run."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgk.cli.help import command_help, group_help, group_of_options, named_help
from mgk.cli.options import REQUIRED, Option, Positional, UsageError, items_of, options_of, replaced

__all__ = [
    "Action",
    "Command",
    "Positional",
    "UsageError",
    "function",
    "group",
    "named",
    "near",
    "read",
    "read_options",
]
Action = Callable[[], None]
Values = dict[tuple[str, ...], Any]
HELP = ("-h", "--help")
OTHER_NAMES = {"--root": "--data-root"}  # as in earlier versions
NUMBER = re.compile(r"-\.?\d")


class HelpShown(SystemExit):
    """The help text was asked for and printed."""


@dataclass(frozen=True)
class Command:
    """One command: its help text, whose first line is its summary, and its parser.

    `parse(program, words)` gets the command's full name, such as "mgk data list", and the words that follow it.
    """

    help: str
    parse: Callable[[str, list[str]], Action]

    @property
    def summary(self) -> str:
        return self.help.splitlines()[0]


def function(run: Callable[..., None]) -> Command:
    """Build a command from a function: its docstring is the help text, its parameters are the options."""
    return Command(help_of(run), functools.partial(read_options, run))


def named(
    what: str,
    run: Callable[..., None],
    parse: Callable[[str, str, list[str]], Action],
    names: Callable[[], Mapping[str, str]],
) -> Command:
    """Build a command whose options depend on its first word, such as the name of a recipe.

    `parse(name, program, words)` gets that word; `names()` has a line about each. Without one, the help text is the
    docstring of `run` and these lines.
    """

    def parse_name(program: str, words: list[str]) -> Action:
        if words[:1] and words[0] in HELP:
            show(named_help(f"{program} {what} [OPTIONS]", help_of(run), names()))
        if not words or words[0].startswith("-"):
            got = words[0] if words else "nothing"
            raise UsageError(f"{what}: expected a name after `{program}`, got {got}; see {program} --help")
        return parse(words[0], f"{program} {words[0]}", words[1:])

    return Command(help_of(run), parse_name)


def group(text: str, commands: Mapping[str, Command]) -> Command:
    """Build a command out of several; the first word chooses one of them."""

    def parse(program: str, words: list[str]) -> Action:
        if words[:1] and words[0] in HELP:
            show(group_help(program, text, {name: command.summary for name, command in commands.items()}))
        name, *rest = words or ["nothing"]
        if name not in commands:
            got = repr(name) if words else name
            hint = near(name, commands)
            raise UsageError(f"command: expected one of {', '.join(commands)}, got {got}{hint}; see {program} --help")
        return commands[name].parse(f"{program} {name}", rest)

    return Command(text, parse)


def read_options(
    run: Callable[..., None],
    program: str,
    words: list[str],
    description: str | None = None,
    **defaults: Any,
) -> Action:
    """Parse words into a call of `run`, whose parameters are the options.

    Args:
        run: the function.
        program: the name of the command, for help and errors.
        words: the words after the name.
        description: the help text, if it is not the docstring of `run`.
        defaults: values in place of the function's own defaults; the fields of a configuration become options.
    """
    return read(run, program, words, options_of(run, defaults), description or help_of(run), defaults)


def read(
    run: Callable[..., None],
    program: str,
    words: list[str],
    options: Sequence[Option],
    description: str,
    arguments: Mapping[str, Any],
    common: Sequence[str] = (),
    complete: Callable[[Values], Values] = dict,
) -> Action:
    """Parse words into a call of `run`.

    Args:
        run: the function.
        program: the name of the command.
        words: the words after the name.
        options: the options of `run`.
        description: the help text.
        arguments: values of parameters that are no options, or that have settings as options.
        common: settings to show on the first page of the help text, although they belong to a group.
        complete: changes the values that are given, by the paths of their options.
    """
    for place in HELP:
        if place in words:
            page = group_of_options(words[words.index(place) + 1 :], options)
            show(command_help(program, description, options, common, page))
    given = complete(parse_words(program, words, options))
    values = {**arguments, **{path[0]: value for path, value in given.items() if len(path) == 1}}
    for name in {path[0] for path in given if len(path) > 1}:
        changes = {path[1:]: value for path, value in given.items() if path[0] == name and len(path) > 1}
        values[name] = replaced(arguments[name], changes)
    return functools.partial(run, **values)


def parse_words(program: str, words: Sequence[str], options: Sequence[Option]) -> Values:
    """Return the values of the options that are given, by their paths."""
    flags = {option.flag: option for option in options if not option.positional}
    found: Values = {}
    loose: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            loose += rest
            break
        if not is_flag(word):
            loose.append(word)
            continue
        flag, equals, value = word.partition("=")
        option, switch = find_flag(program, flag, flags)
        if option.type is bool:
            if equals:
                raise UsageError(f"{flag}: expected no value, got {value!r}; --no-{option.name} switches it off")
            found[option.path] = switch
            continue
        taken = [value] if equals else take(option, rest)
        found[option.path] = option.value(taken)
    return found | place(program, loose, [option for option in options if option.positional])


def is_flag(word: str) -> bool:
    """Whether a word is the name of an option, not a value such as -3."""
    return word.startswith("-") and len(word) > 1 and not NUMBER.match(word)


def take(option: Option, rest: list[str]) -> list[str]:
    """Remove the words that are the value of an option from the front of the rest."""
    items, repeats = items_of(option.type)
    end = next((i for i, word in enumerate(rest) if is_flag(word)), len(rest))
    count = end if repeats else min(end, len(items))
    taken, rest[:] = rest[:count], rest[count:]
    return taken


def find_flag(program: str, flag: str, flags: Mapping[str, Option]) -> tuple[Option, bool]:
    """Return the option of a flag, and whether it switches on; an unknown one is an error with a suggestion."""
    name = flag.replace("_", "-")
    if name not in flags and OTHER_NAMES.get(name) in flags:
        name = OTHER_NAMES[name]
    if name in flags:
        return flags[name], True
    off = flags.get(f"--{name.removeprefix('--no-')}")
    if name.startswith("--no-") and off is not None and off.type is bool:
        return off, False
    switches = [f"--no-{option.name}" for option in flags.values() if option.type is bool]
    same = [known for known in flags if known.rpartition(".")[2] == name.removeprefix("--")]
    hint = f"; did you mean {' or '.join(same)}?" if same else near(name, (*flags, *switches))
    raise UsageError(f"{flag}: no such option{hint}; see {program} --help")


def place(program: str, words: Sequence[str], positional: Sequence[Option]) -> Values:
    """Give the words without a flag to the positional arguments."""
    found: Values = {}
    rest = list(words)
    for option in positional:
        repeats = items_of(option.type)[1]
        taken = rest if repeats else rest[:1]
        rest = rest[len(taken) :]
        if taken:
            found[option.path] = option.value(taken)
        elif option.default is REQUIRED and not repeats:
            raise UsageError(
                f"{option.flag}: expected {option.text.rstrip('.')}, got nothing; type: {program} {option.flag}"
            )
        elif option.default is REQUIRED:
            found[option.path] = ()  # the command says what it needs
    if rest:
        takes = " ".join(option.flag for option in positional) or "no arguments, only options"
        raise UsageError(f"{rest[0]!r}: not expected here; {program} takes {takes}; see {program} --help")
    return found


def near(word: str, known: Sequence[str] | Mapping[str, object]) -> str:
    """Return a suggestion for a misspelt word, if one is near."""
    found = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


def help_of(run: Callable[..., None]) -> str:
    """Return the docstring of a function without its list of arguments."""
    return (inspect.getdoc(run) or "").partition("\n\nArgs:")[0]


def show(text: str) -> None:
    """Print a help text and exit."""
    print(text)
    raise HelpShown(0)
