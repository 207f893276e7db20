"""From the words of a command line to a function call that is ready to run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

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

    @functools.wraps(run)
    def later(*args: object, **kwargs: object) -> Action:
        return functools.partial(run, *args, **kwargs)

    def parse(program: str, words: list[str]) -> Action:
        with one_line_errors():
            action: Action = tyro.cli(later, prog=program, args=words)
        return action

    return Command(inspect.getdoc(run) or "", parse)


def named(what: str, parse: Callable[[str, str, list[str]], Action]) -> Command:
    """Build a command whose options depend on its first word, such as the name of a recipe.

    `parse(name, program, words)` gets that word. Its docstring is the help text that is shown without one.
    """
    text = inspect.getdoc(parse) or ""

    def parse_name(program: str, words: list[str]) -> Action:
        show_help(words, f"usage: {program} {what} [OPTIONS]\n\n{text}")
        if not words or words[0].startswith("-"):
            raise UsageError(f"{what}: expected a name after `{program}`, got {words[0] if words else 'nothing'}")
        try:
            return parse(words[0], f"{program} {words[0]}", words[1:])
        except (ValueError, TypeError) as error:
            raise UsageError(" ".join(str(error).split())) from None

    return Command(text, parse_name)


def group(text: str, commands: Mapping[str, Command]) -> Command:
    """Build a command out of several, of which the first word chooses one."""

    table = "\n".join(f"  {name:10}{command.summary}" for name, command in commands.items())

    def parse(program: str, words: list[str]) -> Action:
        usage, more = f"usage: {program} COMMAND ...", f"`{program} COMMAND --help` shows the options of a command."
        show_help(words, f"{usage}\n\n{text}\n\n{table}\n\n{more}")
        name, *rest = words or ["nothing"]
        if name not in commands:
            raise UsageError(f"command: expected one of {', '.join(commands)}, got {name!r}")
        return commands[name].parse(f"{program} {name}", rest)

    return Command(text, parse)


def option(type_: Any, default: object, text: str) -> tuple[Any, Any]:
    """Describe one option for `read_options`."""
    return Annotated[type_, tyro.conf.arg(help=text)], dataclasses.field(default=default)  # type: ignore[call-overload]


def read_options(options: Mapping[str, tuple[Any, Any]], program: str, description: str, words: list[str]) -> Any:
    """Parse words into an object that has one attribute for each option."""
    fields = [(name, type_, field) for name, (type_, field) in options.items()]
    kind: Any = dataclasses.make_dataclass("Options", fields, frozen=True)
    with one_line_errors():
        return tyro.cli(kind, prog=program, description=description, args=words, config=(tyro.conf.AvoidSubcommands,))


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
