"""The command line, `mgk` or `python -m mgk`.

`COMMANDS` lists the commands; each calls a function that Python callers can use too. Commands that need Transformers or
matplotlib import them when they run.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import mgk

EXTRAS = {
    "tyro": "train", "rich": "train", "lightning_fabric": "train", "safetensors": "train", "matplotlib": "plot",
    "transformers": "hf",
}  # fmt: skip


def what_to_install(error: Exception) -> str:
    """Return the advice that follows the message of an error: the extra to install, if a library of one is missing."""
    extra = EXTRAS.get((error.name or "").split(".")[0]) if isinstance(error, ModuleNotFoundError) else None
    return f": pip install 'mgk[{extra}]'" if extra else ""


try:
    import rich  # noqa: F401  # for progress bars

    from mgk.cli import bench, data, demo, hf, inspect, train
    from mgk.cli.parsing import Action, Command, UsageError, function, group
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
    """Run the command line. Return its exit status: 0, 1 for an error, 2 for a command line that cannot be parsed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        action = parse([word for word in words if word != "--debug"])
    except UsageError as error:
        print(f"mgk: error: {error} (see mgk --help)", file=sys.stderr)
        return 2
    try:
        action()
    except train.Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + signal.SIGTERM
    except Exception as error:
        if debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"mgk: error: {text}{what_to_install(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse(words: Sequence[str]) -> Action:
    """Parse a command line into a call that is ready to run; raises `UsageError`."""
    if list(words) == ["--version"]:
        return lambda: print(f"mgk {mgk.__version__}")
    return ROOT.parse("mgk", list(words))
