"""From the words of a command line to a function call that is ready to run."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tyro

Action = Callable[[], None]


class UsageError(Exception):
    """The command line cannot be parsed."""


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


def named(what: str, run: Callable[..., None], parse: Callable[[str, str, list[str]], Action]) -> Command:
    """Build a command whose options depend on its first word, such as the name of a recipe.

    `parse(name, program, words)` gets that word. Without one, the help text is the docstring of `run`.
    """

    def parse_name(program: str, words: list[str]) -> Action:
        show_help(words, f"usage: {program} {what} [OPTIONS]\n\n{help_of(run)}")
        if not words or words[0].startswith("-"):
            raise UsageError(f"{what}: expected a name after `{program}`, got {words[0] if words else 'nothing'}")
        try:
            return parse(words[0], f"{program} {words[0]}", words[1:])
        except (ValueError, TypeError) as error:
            raise UsageError(" ".join(str(error).split())) from None

    return Command(help_of(run), parse_name)


def group(text: str, commands: Mapping[str, Command]) -> Command:
    """Build a command out of several; the first word chooses one of them."""
    table = "\n".join(f"  {name:10}{command.summary}" for name, command in commands.items())

    def parse(program: str, words: list[str]) -> Action:
        usage, more = f"usage: {program} COMMAND ...", f"`{program} COMMAND --help` shows the options of a command."
        show_help(words, f"{usage}\n\n{text}\n\n{table}\n\n{more}")
        name, *rest = words or ["nothing"]
        if name not in commands:
            raise UsageError(f"command: expected one of {', '.join(commands)}, got {name!r}")
        return commands[name].parse(f"{program} {name}", rest)

    return Command(text, parse)


def read_options(
    run: Callable[..., None], program: str, words: list[str], description: str | None = None, **defaults: Any
) -> Action:
    """Parse words into a call of `run`, whose parameters are the options; `defaults` replace its own defaults."""

    @functools.wraps(run)
    def later(*args: object, **kwargs: object) -> Action:
        return functools.partial(run, *args, **kwargs)

    options = functools.partial(later, **defaults)
    with one_line_errors():
        return tyro.cli(
            options, prog=program, description=description, args=words, config=(tyro.conf.AvoidSubcommands,)
        )


def help_of(run: Callable[..., None]) -> str:
    """Return the docstring of a function without its list of arguments."""
    return (inspect.getdoc(run) or "").partition("\n\nArgs:")[0]


def show_help(words: list[str], text: str) -> None:
    """Print the help text and exit, if the first word asks for it."""
    if words[:1] in (["-h"], ["--help"]):
        print(text)
        raise SystemExit(0)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn tyro's boxed error message into a `UsageError` of one line."""
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            yield
    except SystemExit as stop:
        if not stop.code:  # --help was shown
            raise
        _, *lines = (line.strip("│╭╮╰╯─ ") for line in message.getvalue().splitlines())
        raise UsageError(" ".join(itertools.takewhile(bool, lines))) from None
