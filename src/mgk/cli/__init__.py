"""The command line, `mgk` or `python -m mgk`.

`COMMANDS` lists the commands; each calls a function that Python callers can use too. Commands that need Transformers or
matplotlib import them when they run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import mgk

EXTRAS = {
    "rich": "train", "lightning_fabric": "train", "safetensors": "train", "matplotlib": "plot",
    "transformers": "hf",
}  # fmt: skip


def what_to_install(error: Exception) -> str:
    """Return the advice that follows the message of an error: the extra to install, if a library of one is missing."""
    extra = EXTRAS.get((error.name or "").split(".")[0]) if isinstance(error, ModuleNotFoundError) else None
    return f": pip install 'mgk[{extra}]'" if extra else ""


try:
    import rich  # noqa: F401  # for progress bars

    from mgk.cli import bench, data, demo, hf, inspect, train
    from mgk.cli.parsing import Action, Command, function, group
    from mgk.data import DataError
    from mgk.train.checkpoint import CheckpointError
    from mgk.train.sample import visible
except ImportError as error:
    message = f"mgk: error: {error}{what_to_install(error)}"
    if "pip install" in message:
        raise SystemExit(message) from None
    raise

COMMANDS: dict[str, Command] = {
    "train": train.with_recipe(train.train),
    "eval": function(train.evaluate),
    "compare": train.with_recipe(train.compare),
    "data": group("List, prepare and verify data sets.", data.COMMANDS),
    "generate": function(hf.generate),
    "convert": function(hf.convert),
    "explore": function(inspect.explore),
    "figures": function(inspect.figures),
    "bench": function(bench.bench),
    "demo": function(demo.demo),
}
ROOT = group("Transformers whose attention keys are mixtures. --debug shows the traceback of an error.", COMMANDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return its exit status: 0, 1 for a failure, 2 for wrong usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        parse([word for word in words if word != "--debug"])()
    except train.Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as head, has enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # nothing more can be written at the exit
        return 128 + signal.SIGPIPE
    except Exception as error:
        if debug:
            raise
        print(f"mgk: error: {told(error)}{what_to_install(error)}", file=sys.stderr)
        return 2 if is_usage(error) else 1
    return 0


def is_usage(error: Exception) -> bool:
    """Whether an error means that the command line is wrong: a value, or a file that is not there.

    Functions raise a ValueError or TypeError for a wrong argument, and errors of their own for what is wrong with data
    and checkpoints.
    """
    if isinstance(error, (DataError, CheckpointError, UnicodeError)):
        return False
    absent = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)
    return isinstance(error, (ValueError, TypeError, *absent))


def told(error: Exception) -> str:
    """Return the message of an error in one line, without numbers of the operating system.

    It may quote a file of a stranger: control characters are shown as codes.
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return visible(f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}")
    return visible(" ".join(str(error).split())) or type(error).__name__


def parse(words: Sequence[str]) -> Action:
    """Parse a command line into a call that is ready to run; a wrong one raises an error."""
    if list(words) == ["--version"]:
        return lambda: print(f"mgk {mgk.__version__}")
    return ROOT.parse("mgk", list(words))
