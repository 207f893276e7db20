"""The command line, `mgk` or `python -m mgk`.

`COMMANDS` lists the commands; each calls a function that Python callers can use too. Commands import what they need
when they run, so that `mgk --help` answers quickly.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import mgk

try:
    import rich  # noqa: F401
    import tyro  # noqa: F401
except ModuleNotFoundError as missing:
    raise SystemExit(f"mgk: error: the command line needs {missing.name}: pip install 'mgk[train]'") from None

from mgk.cli import bench, data, demo, hf, inspect, train
from mgk.cli.parsing import Action, Command, UsageError, function, group, named

COMMANDS: dict[str, Command] = {
    "train": named("RECIPE", train.train),
    "eval": function(train.evaluate),
    "compare": named("RECIPE", train.compare),
    "data": group("List, prepare and verify data sets.", data.COMMANDS),
    "generate": function(hf.generate),
    "convert": function(hf.convert),
    "explore": function(inspect.explore),
    "figures": function(inspect.figures),
    "bench": function(bench.bench),
    "demo": function(demo.demo),
}
ROOT = group("Transformers whose attention keys are mixtures. --debug shows the traceback of an error.", COMMANDS)
EXTRAS = {"lightning_fabric": "train", "safetensors": "train", "matplotlib": "plot", "transformers": "hf"}


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
        extra = EXTRAS.get(error.name or "") if isinstance(error, ModuleNotFoundError) else None
        advice = f": pip install 'mgk[{extra}]'" if extra else ""
        print(f"mgk: error: {' '.join(str(error).split()) or type(error).__name__}{advice}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse(words: Sequence[str]) -> Action:
    """Parse a command line into a call that is ready to run; raises `UsageError`."""
    if list(words) == ["--version"]:
        return lambda: print(f"mgk {mgk.__version__}")
    return ROOT.parse("mgk", list(words))
