"""`mgk train`, `mgk compare` and `mgk eval`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mgk.cli.parsing import Action, option, read_options

RUNS = Path("runs")


class Stopped(Exception):  # noqa: N818
    """A run was asked to stop, and did so after writing a checkpoint."""


def train(recipe: str, program: str, words: list[str]) -> Action:
    """Train a model.

    For example: mgk train lra-text --model.attention smgk --model.heads 4 --seed 1 --out runs/mine

    RECIPE is lra-listops, lra-text, lra-retrieval, lra-image, wikitext103, wikitext2, enwiki, enwik8, fashion-mnist or
    cifar10. Its data must be prepared first (mgk data list). `mgk train RECIPE --help` shows every setting; each can be
    changed. The configuration, the log and the checkpoints are written to one folder. A run that was stopped or killed
    continues with `--resume`. With several GPUs: torchrun --nproc-per-node 8 -m mgk train RECIPE ... See
    docs/training.md.

    In Python: `mgk.train.train(mgk.recipes.recipe("lra-text"), "runs/text")`.
    """
    options = {
        "out": option(Path | None, None, "Folder of the run; runs/RECIPE-ATTENTION-HEADS-SEED if not given."),
        "resume": option(bool, False, "Continue from the last checkpoint in that folder, if there is one."),
    }
    return functools.partial(run_train, read_recipe(recipe, options, program, words))


def compare(recipe: str, program: str, words: list[str]) -> Action:
    """Train several attentions and compare them.

    For example: mgk compare lra-text --attentions softmax:8 smgk:4 mgk:4:hard --seeds 5

    Every attention is trained with every seed. Finished runs are not repeated, so the same command continues a
    comparison that was stopped. The result is a table: mean and 95% interval on the test split, parameters, FLOPs per
    example, time per step, peak memory. --jobs 4 trains four models at a time on one GPU. All settings of
    `mgk train RECIPE` can be added.

    In Python: `mgk.recipes.compare(config, ["softmax:8", "smgk:4"], seeds=5, out="runs/grid")`.
    """
    options = {
        "attentions": option(tuple[str, ...], (), "The attentions, each as VARIANT:HEADS[:hard|:em|:uniform]."),
        "seeds": option(int, 1, "Runs of each attention, with consecutive seeds from --seed."),
        "out": option(Path | None, None, "Folder of the comparison; runs/compare-RECIPE if not given."),
        "jobs": option(int, 1, "Runs at a time on one device."),
    }
    return functools.partial(run_compare, read_recipe(recipe, options, program, words))


def read_recipe(recipe: str, own: dict[str, tuple[Any, Any]], program: str, words: list[str]) -> Any:
    """Parse a command's own options and the settings of a recipe, which are the defaults."""
    from mgk import recipes
    from mgk.train.config import Config

    default = recipes.recipe(recipe, paper="--paper" in words)
    options = {
        **own,
        "config": (Annotated[Config, tyro.conf.arg(name="")], dataclasses.field(default=default)),
        "paper": option(bool, False, "Follow the authors' code where it differs from sound practice: pool over "
            "padding, no buckets, and choose the text task's checkpoint on its test set."),
        "data_root": option(Path | None, None, "Folder of the prepared data sets; $MGK_DATA or ~/.cache/mgk/data."),
    }  # fmt: skip
    return read_options(options, program, recipes.describe(recipe), words)


def run_train(chosen: Any) -> None:
    from mgk.train import train as start

    c = chosen.config
    out = chosen.out or RUNS / f"{c.recipe}-{c.model.attention}-{c.model.heads}-{c.seed}"
    result = start(c, out, resume=chosen.resume, data_root=chosen.data_root, quiet=False)
    if not result.finished:
        raise Stopped(f"stopped at step {result.step}; continue with --out {out} --resume")
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
    """Write the HTML report of a comparison: table, curves, costs and the attention of its models."""
    from mgk.inspect.report import comparison_page

    try:
        comparison_page(folder, data_root=data_root).write(folder / "report.html")
    except ValueError as reason:  # attention that the page cannot show
        print(f"no report: {reason}")
    else:
        print(f"report: {folder / 'report.html'}")


def evaluate(
    run: tyro.conf.Positional[Path],
    split: str = "",
    which: Literal["best", "last"] = "best",
    sliding: bool | None = None,
    batch: int = 256,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    data_root: Path | None = None,
) -> None:
    """Measure the accuracy or the perplexity of a trained model.

    A language model has two perplexities. `non-overlapping` cuts the text into separate windows and is cheap. `sliding
    by one` is the paper's: the window moves by one token, and each token is predicted from a full window before it.

    In Python: `mgk.train.evaluate("runs/text")`.

    Args:
        run: folder of the run.
        split: which split; the configuration's test split if not given.
        which: which checkpoint.
        sliding: compute the paper's perplexity too; by default on a GPU, where it takes minutes.
        batch: windows per batch of the sliding evaluation.
        device: where to compute.
        data_root: folder of the prepared data sets; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    from mgk.train import evaluate as measure

    found = measure(
        run, split=split, which=which, sliding=sliding, batch=batch, device=device, data_root=data_root, quiet=False
    )
    for name, value in found.items():
        if isinstance(value, dict):
            value = "  ".join(f"{unit} {number:.4f}" for unit, number in value.items())
        print(f"{name:16}{value:.4f}" if isinstance(value, float) else f"{name:16}{value}")
