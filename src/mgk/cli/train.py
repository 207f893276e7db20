"""`mgk train`, `mgk compare` and `mgk eval`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import mgk.train
from mgk import recipes
from mgk.cli.options import options_of
from mgk.cli.parsing import Action, Command, Values, named, read
from mgk.train.config import Config

RUNS = Path("runs")
COMMON = ("model.attention", "model.heads", "data.batch", "optimiser.lr", "steps", "eval-every", "seed", "device")


class Stopped(Exception):  # noqa: N818
    """A run was asked to stop, and did so after writing a checkpoint."""


def train(
    config: Config, out: Path | None = None, resume: bool = False, paper: bool = False, data_root: Path | None = None
) -> None:
    """Train a model.

    For example: mgk train lra-text --model.attention smgk --model.heads 4 --seed 1 --out runs/mine

    The data must be prepared first (mgk data list). `mgk train RECIPE --help` shows the settings; each can be changed.
    The configuration, the log and the checkpoints are written to one folder. A run that was stopped or killed continues
    with `--resume`. With several GPUs: torchrun --nproc-per-node 8 -m mgk train RECIPE ... See docs/training.md.

    In Python: `mgk.train.train(mgk.recipes.recipe("lra-text"), "runs/text")`.

    Args:
        config: the settings of the recipe.
        out: folder of the run; runs/RECIPE-ATTENTION-HEADS-SEED if not given.
        resume: continue from the last checkpoint in that folder, if there is one.
        paper: do as the authors: pool over padding, no buckets, choose the text task's checkpoint on its test set.
        data_root: folder of the prepared data sets; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    out = out or RUNS / f"{config.recipe}-{config.model.attention}-{config.model.heads}-{config.seed}"
    result = mgk.train.train(config, out, resume=resume, data_root=data_root, quiet=False)
    if not result.finished:
        raise Stopped(f"stopped at step {result.step}; continue with --out {out} --resume")
    test = "  ".join(f"{name} {value:.4f}" for name, value in result.test.items())
    print(f"test of the best checkpoint (step {result.best_step}): {test}\nwritten to {out}")


def compare(
    config: Config,
    attentions: tuple[str, ...] = (),
    seeds: int = 1,
    out: Path | None = None,
    jobs: int = 1,
    paper: bool = False,
    data_root: Path | None = None,
) -> None:
    """Train several attentions and compare them.

    For example: mgk compare lra-text --attentions softmax:8 smgk:4 mgk:4:hard --seeds 5

    Every attention is trained with every seed. Finished runs are not repeated, so the same command continues a
    comparison that was stopped. The result is a table: mean and 95% interval on the test split, parameters, FLOPs per
    example, time per step, peak memory. --jobs 4 trains four models at a time on one GPU. All settings of
    `mgk train RECIPE` can be added.

    In Python: `mgk.recipes.compare(config, ["softmax:8", "smgk:4"], seeds=5, out="runs/grid")`.

    Args:
        config: the settings of the recipe.
        attentions: the attentions, each as VARIANT:HEADS[:hard|:em|:uniform].
        seeds: runs of each attention, with consecutive seeds from --seed.
        out: folder of the comparison; runs/compare-RECIPE if not given.
        jobs: runs at a time on one device.
        paper: do as the authors: pool over padding, no buckets, choose the text task's checkpoint on its test set.
        data_root: folder of the prepared data sets; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    out = out or RUNS / f"compare-{config.recipe}"
    found = recipes.compare(config, attentions, seeds=seeds, out=out, jobs=jobs, data_root=data_root, quiet=False)
    if found.rows:
        print(f"{found.table()}\nwritten to {out}/comparison.md and comparison.json")
        write_report(out, data_root)
    if found.failed:
        raise RuntimeError(f"{len(found.failed)} runs failed; {next(iter(found.failed.values()))}")


def with_recipe(run: Callable[..., None]) -> Command:
    """Build a command from `train` or `compare`: the recipe, with or without --paper, has the default settings."""

    def parse(name: str, program: str, words: list[str]) -> Action:
        config = recipes.recipe(name, paper="--paper" in words)
        options = [option for option in options_of(run, {"config": config}) if option.name != "recipe"]
        return read(
            run, program, words, options, recipes.describe(name), {"config": config}, COMMON,
            lambda given: shortened(given, config),
        )  # fmt: skip

    return named("RECIPE", run, parse, lambda: {name: recipes.describe(name) for name in recipes.RECIPES})


def shortened(given: Values, config: Config) -> Values:
    """Shorten the warm-up of a run whose --steps are fewer, in proportion, and say so."""
    steps, warmup = given.get(("config", "steps")), config.optimiser.warmup
    if steps is None or not 0 < steps < warmup or ("config", "optimiser", "warmup") in given:
        return given
    shorter = round(warmup * steps / config.steps)
    print(
        f"mgk: --optimiser.warmup: shortened from {warmup:,} to {shorter:,} steps, in proportion to --steps {steps:,}",
        file=sys.stderr,
    )
    return given | {("config", "optimiser", "warmup"): shorter}


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
    run: Path,
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
        data_root: folder of the prepared data sets; that of the run if not given.
    """
    found = mgk.train.evaluate(
        run, split=split, which=which, sliding=sliding, batch=batch, device=device, data_root=data_root, quiet=False
    )
    for name, value in found.items():
        if isinstance(value, dict):
            value = "  ".join(f"{unit} {number:.4f}" for unit, number in value.items())
        print(f"{name:16}{value:.4f}" if isinstance(value, float) else f"{name:16}{value}")
