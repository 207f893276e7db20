"""The command line, `mgk` or `python -m mgk`: a thin face over functions that Python callers have too.

A subcommand is a function below: its docstring is its help, its signature its options. It imports what it needs when
it is called, so that `mgk --help` answers at once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from mgk.environment import require

require("the command line", "tyro", "rich")

import tyro

import mgk
from mgk.cli.hf import convert, generate
from mgk.cli.inspect import explore, figures

RUNS = Path("runs")


def train(recipe: tyro.conf.Positional[str]) -> None:
    """Train a model: mgk train RECIPE [--model.attention smgk --model.heads 4 --seed 1 --out runs/mine --resume ...]

    RECIPE is lra-listops, lra-text, lra-retrieval, lra-image, wikitext103, wikitext2, enwiki, enwik8, fashion-mnist or
    cifar10; its data must be prepared first (mgk data list). `mgk train RECIPE --help` shows every setting; each can be
    changed. What it learns goes into a folder, with the configuration, the log and checkpoints; after a stop of any
    kind `--resume` goes on where it was. With several GPUs: torchrun --nproc-per-node 8 -m mgk train RECIPE ...
    (docs/training.md).

    In Python: `mgk.train.train(mgk.recipes.recipe("lra-text"), "runs/text")`.

    Args:
        recipe: which experiment.
    """
    raise AssertionError("parse_recipe has it")  # what follows RECIPE depends on it


def compare(recipe: tyro.conf.Positional[str]) -> None:
    """Train several attentions: mgk compare RECIPE --attentions softmax:8 smgk:4 mgk:4:hard --seeds 5 [...]

    Every attention is trained with every seed; runs that are finished are not run again, so a grid that was stopped
    goes on with the same command. Ends with a table: mean and 95% interval on the test split, parameters, FLOPs of an
    example, time per step, peak memory. --jobs 4 runs four side by side on one GPU. All settings of `mgk train RECIPE`
    may follow.

    In Python: `mgk.recipes.compare(config, ["softmax:8", "smgk:4"], seeds=5, out="runs/grid")`.

    Args:
        recipe: which experiment; see mgk train --help.
    """
    raise AssertionError("parse_recipe has it")


def evaluate(
    run: tyro.conf.Positional[Path],
    split: str = "",
    which: Literal["best", "last"] = "best",
    sliding: bool | None = None,
    batch: int = 256,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    data_root: Path | None = None,
) -> None:
    """Measure a trained model: accuracy, or perplexity.

    A language model has two perplexities. `non-overlapping` cuts the text into windows and is cheap. `sliding by one`
    is the paper's: the window moves by one token, and each token is predicted from as many as it holds.

    In Python: `mgk.train.evaluate("runs/text")`.

    Args:
        run: folder of the run.
        split: which split; the configuration's test split if not given.
        which: which checkpoint.
        sliding: the paper's perplexity too; by default on a GPU, where it takes minutes.
        batch: windows of a batch of the sliding window.
        device: where to compute.
        data_root: where prepared data sets are; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    from mgk.train import evaluate as measure

    found = measure(
        run, split=split, which=which, sliding=sliding, batch=batch, device=device, data_root=data_root, quiet=False
    )
    for name, value in found.items():
        if isinstance(value, dict):
            value = "  ".join(f"{unit} {number:.4f}" for unit, number in value.items())
        print(f"{name:16}{value:.4f}" if isinstance(value, float) else f"{name:16}{value}")


def data() -> None:
    """Data sets: mgk data list | prepare NAME [--source PATH] | verify. Each has a --help of its own."""
    raise AssertionError("parse has it")


def data_list(root: Path | None = None) -> None:
    """List the data sets, and which of them are prepared.

    In Python: `mgk.data.names()`, `mgk.data.describe(name)`.

    Args:
        root: where prepared data sets are; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    import mgk.data

    where = root or mgk.data.root()
    folders = [path.name for path in mgk.data.prepared(where)]
    for name in mgk.data.names():
        ready = [folder for folder in folders if folder == name or folder.startswith(f"{name}-")]
        ready = [folder for folder in ready if folder == name or folder not in mgk.data.names()]
        print(f"{name:15}{'prepared  ' if ready else '          '}{mgk.data.describe(name).summary}")
    print(f"\nin {where}; prepare one with: mgk data prepare NAME [--source PATH]")


def data_prepare(name: tyro.conf.Positional[str]) -> None:
    """Prepare a data set once: mgk data prepare NAME [--source PATH]; `mgk data prepare NAME --help` shows its options.

    In Python: `mgk.data.prepare("imdb", source="aclImdb")`.

    Args:
        name: see mgk data list.
    """
    raise AssertionError("parse_prepare has it")


def data_verify(names: tyro.conf.Positional[tuple[str, ...]] = (), root: Path | None = None) -> None:
    """Read prepared data sets whole and compare them with the sums of their manifests.

    In Python: `mgk.data.load(name, verify=True)`.

    Args:
        names: folders to verify, as they are called under the root; all if none is named.
        root: where prepared data sets are; $MGK_DATA or ~/.cache/mgk/data if not given.
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
        print(f"{name:15}sound: {counts}")


def bench(
    what: Literal["attention", "train"] = "attention",
    device: Literal["cpu", "cuda"] = "cpu",
    cases: tuple[str, ...] = (),
    rounds: int | None = None,
    output: Path | None = None,
) -> None:
    """Time MGK and sMGK at half the heads against scaled_dot_product_attention at all of them.

    Every result is checked against the dense formula in float64 first; a wrong one stops the run. The methods take
    turns, and a speed-up is the median over the rounds of the ratio to the baseline of the same round. Memory is the
    peak beyond the inputs. All of it, with the machine, the versions and the commit, goes into a JSON file.

    In Python: `benchmarks.measure.run(Cpu(), CASES.values())`, with both names from `benchmarks.cpu`.

    Args:
        what: attention alone, or whole training steps of the Long Range Arena's text model (on cuda).
        device: what to measure. On cuda all three SDPA backends are the baseline, replayed from CUDA graphs like ours.
        cases: which of the CPU's shapes, e.g. `lra-1024 wikitext`; all if none is named. Not for cuda, nor for train.
        rounds: how often each method is timed; 5 if not given. Not for attention on cuda, which has its own.
        output: where the JSON goes; results/bench-DEVICE.json or results/train-DEVICE.json if not given, and with
            cases a file of their own, e.g. results/bench-cpu-wikitext.json.
    """
    if cases and (what, device) != ("attention", "cpu"):
        raise ValueError(f"--cases: expected none with --what {what} --device {device}, got {' '.join(cases)}")
    if rounds is not None and (what, device) == ("attention", "cuda"):
        raise ValueError(f"--rounds: expected none with --what attention --device cuda, got {rounds}")
    rounds = 5 if rounds is None else rounds
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("--device: expected a machine with a CUDA GPU for cuda, found none")
    if what == "train":
        from benchmarks import train as training

        if rounds < 1:
            raise ValueError(f"rounds: expected at least 1, got {rounds}")
        path = output or Path("results") / f"train-{device}.json"
        training.main(["--device", device, "--rounds", str(rounds), "--output", str(path)])
        return
    if device == "cuda":
        from benchmarks import cuda

        cuda.main(["--output", str(output or Path("results") / "bench-cuda.json")])
        return
    from rich.console import Console

    from benchmarks.cpu import CASES, Cpu
    from benchmarks.measure import run

    for name in cases:
        if name not in CASES:
            raise ValueError(f"--cases: expected some of {', '.join(CASES)}, got {name!r}")
    console = Console()
    report = run(Cpu(), [CASES[name] for name in cases or CASES], rounds=rounds, console=console)
    console.print(report.tables())
    path = output or Path("results") / f"{'-'.join(('bench', device, *cases))}.json"  # some cases are not all
    console.print(f"written to {report.save(path)}")


def show_demo(steps: int = 0, out: Path = RUNS / "demo") -> None:
    """Show every variant agree with the dense formula, then train softmax with 4 heads and sMGK with 2.

    The task is short ListOps, made on the spot. It takes a few minutes on two cores and ends with a table and the
    paths of what it wrote; stopped, it goes on where it was.

    In Python: `mgk.cli.demo.demo(console=rich.console.Console())`.

    Args:
        steps: how long to train each model; 0 is long enough to see them learn.
        out: where data, runs and the table go.
    """
    from rich.console import Console

    from mgk.cli.demo import demo as show
    from mgk.cli.demo import folder

    show(steps=steps, out=out, console=Console())
    write_report(folder(out, steps), out / "data")


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "eval": evaluate,
    "compare": compare,
    "data": data,
    "figures": figures,
    "explore": explore,
    "generate": generate,
    "convert": convert,
    "bench": bench,
    "demo": show_demo,
}
DATA_COMMANDS: dict[str, Callable[..., None]] = {"list": data_list, "prepare": data_prepare, "verify": data_verify}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 for an error, 2 for a command that does not parse."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    try:
        command = parse([argument for argument in arguments if argument != "--debug"])
    except UsageError as error:
        print(f"mgk: error: {error} (see mgk --help)", file=sys.stderr)
        return 2
    try:
        command()
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + signal.SIGTERM
    except Exception as error:
        if debug:
            raise
        print(f"mgk: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class UsageError(Exception):
    """A command line that does not parse."""


class Stopped(Exception):  # noqa: N818
    """A run that was told to stop, and did so in good order."""


def parse(arguments: Sequence[str]) -> Callable[[], None]:
    """The subcommand with its options, ready to be called; tyro's boxed complaint becomes one line."""
    words = list(arguments)
    try:
        if words[:1] in (["train"], ["compare"]) and len(words) > 1 and not words[1].startswith("-"):
            return parse_recipe(words[0], words[1], words[2:])
        if words[:2] == ["data", "prepare"] and len(words) > 2 and not words[2].startswith("-"):
            return parse_prepare(words[2], words[3:])
    except (ValueError, TypeError) as error:
        raise UsageError(" ".join(str(error).split())) from None

    def later(function: Callable[..., None]) -> Callable[..., Callable[[], None]]:
        @functools.wraps(function)
        def with_options(*args: object, **kwargs: object) -> Callable[[], None]:
            return functools.partial(function, *args, **kwargs)

        return with_options

    if words == ["--version"]:
        return lambda: print(f"mgk {mgk.__version__}")
    nested = words[:1] == ["data"]
    commands, rest = (DATA_COMMANDS, words[1:]) if nested else (COMMANDS, words)
    if rest and not rest[0].startswith("-") and rest[0] not in commands:
        raise UsageError(f"command: expected one of {', '.join(commands)}, got {rest[0]!r}")
    with one_line():
        command: Callable[[], None] = tyro.extras.subcommand_cli_from_dict(
            {name: later(function) for name, function in commands.items()},
            prog="mgk data" if nested else "mgk",
            description="Transformers whose attention keys are mixtures. --debug shows the traceback of an error.",
            args=rest,
        )
    return command


def parse_recipe(command: str, name: str, words: list[str]) -> Callable[[], None]:
    """`train` and `compare`: the recipe's configuration is the default of every option."""
    import dataclasses

    from mgk import recipes
    from mgk.train.config import Config

    default = recipes.recipe(name, paper="--paper" in words)
    flat = Annotated[Config, tyro.conf.arg(name="")]
    shared: list[tuple[str, Any, Any]] = [
        ("config", flat, default),
        ("paper", helped(bool, "The authors' way where it differs from sound practice: padded pooling, no "
            "buckets, and the text task's checkpoint chosen on its test set."), False),
        ("data_root", helped(Path | None, "Where prepared data sets are; $MGK_DATA or ~/.cache/mgk/data."), None),
    ]  # fmt: skip
    own: dict[str, list[tuple[str, Any, Any]]] = {
        "train": [
            ("out", helped(Path | None, "Folder of the run; runs/RECIPE-ATTENTION-HEADS-SEED if not given."), None),
            ("resume", helped(bool, "Go on from the last checkpoint in that folder, if there is one."), False),
        ],
        "compare": [
            ("attentions", helped(tuple[str, ...], "VARIANT:HEADS[:hard|:em|:uniform] of each."), ()),
            ("seeds", helped(int, "Runs of each attention, with seeds from --seed on."), 1),
            ("out", helped(Path | None, "Folder of the grid; runs/compare-RECIPE if not given."), None),
            ("jobs", helped(int, "Runs side by side on one device."), 1),
        ],
    }
    fields = [(n, t, dataclasses.field(default=d)) for n, t, d in own[command] + shared]
    options: Any = dataclasses.make_dataclass("Options", fields, frozen=True)
    with one_line():
        chosen = tyro.cli(
            options,
            prog=f"mgk {command} {name}",
            description=recipes.describe(name),
            args=words,
            config=(tyro.conf.AvoidSubcommands,),
        )
    return functools.partial({"train": run_train, "compare": run_compare}[command], chosen)


def run_train(chosen: Any) -> None:
    from mgk.train import train as start

    c = chosen.config
    out = chosen.out or RUNS / f"{c.recipe}-{c.model.attention}-{c.model.heads}-{c.seed}"
    result = start(c, out, resume=chosen.resume, data_root=chosen.data_root, quiet=False)
    if not result.finished:
        raise Stopped(f"stopped at step {result.step}; go on with --out {out} --resume")
    test = "  ".join(f"{name} {value:.4f}" for name, value in result.test.items())
    print(f"test of the best checkpoint (step {result.best_step}): {test}\nwritten to {out}")


def run_compare(chosen: Any) -> None:
    from mgk.recipes import compare as start

    out = chosen.out or RUNS / f"compare-{chosen.config.recipe}"
    found = start(
        chosen.config,
        chosen.attentions,
        seeds=chosen.seeds,
        out=out,
        jobs=chosen.jobs,
        data_root=chosen.data_root,
        quiet=False,
    )
    if found.rows:
        print(f"{found.table()}\nwritten to {out}/comparison.md and comparison.json")
        write_report(out, chosen.data_root)
    if found.failed:
        raise RuntimeError(f"{len(found.failed)} runs failed; {next(iter(found.failed.values()))}")


def write_report(folder: Path, data_root: Path | None) -> None:
    """The page of a comparison: table, curves, costs, then the attention of its models."""
    from mgk.inspect.report import comparison_page

    try:
        comparison_page(folder, data_root=data_root).write(folder / "report.html")
    except ValueError as reason:  # attention that the page cannot show
        print(f"no page: {reason}")
    else:
        print(f"page: {folder / 'report.html'}")


def parse_prepare(name: str, words: list[str]) -> Callable[[], None]:
    """`data prepare`: every set has options of its own, which its description knows."""
    import dataclasses

    import mgk.data

    described = mgk.data.describe(name)

    def type_of(value: object) -> Any:
        if isinstance(value, tuple):
            return tuple[tuple(type(item) for item in value)]  # type: ignore[misc]
        return int | None if value is None else type(value)

    fields: list[tuple[str, Any, Any]] = [
        ("source", helped(Path | None, f"Where the raw files are: {described.origin}."), None),
        ("root", helped(Path | None, "Where prepared sets go; $MGK_DATA or ~/.cache/mgk/data if not given."), None),
        *((option, type_of(value), value) for option, value in described.options.items()),
    ]
    options: Any = dataclasses.make_dataclass("Options", [(n, t, dataclasses.field(default=d)) for n, t, d in fields])
    with one_line():
        chosen = tyro.cli(options, prog=f"mgk data prepare {name}", description=described.summary, args=words)

    def prepare() -> None:
        print(f"prepared in {mgk.data.prepare(name, **vars(chosen))}")

    return prepare


def helped(type_: Any, text: str) -> Any:
    return Annotated[type_, tyro.conf.arg(help=text)]


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Make one line of what tyro has to complain about."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            yield
    except SystemExit as stop:
        if not stop.code:  # --help was shown
            raise
        _, *lines = (line.strip("│╭╮╰╯─ ") for line in complaint.getvalue().splitlines())
        raise UsageError(" ".join(itertools.takewhile(bool, lines))) from None
