"""`mgk figures` and `mgk explore`: command-line wrappers of `mgk.inspect.report`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mgk.cli.parsing import Positional

if TYPE_CHECKING:
    from mgk.inspect import Page
    from mgk.inspect.runs import Run


def figures(
    runs: Positional[tuple[Path, ...]],
    out: Path = Path("figures"),
    matrices: int = 1000,
    length: int = 1024,
    index: int = 0,
    which: Literal["best", "last"] = "best",
    data_root: Path | None = None,
) -> None:
    """Draw the paper's figures for some runs: curves, attention maps, ranks, costs and results, as SVG and PNG.

    Tables are written as Markdown and LaTeX. Maps and ranks need the data that the runs were trained on.

    In Python: `mgk.inspect.report.write_figures([Run.open("runs/a")], Path("figures"))`. Each figure is a function of
    plain arrays in `mgk.inspect.figures`.

    Args:
        runs: folders of runs; the cost curves use the model size of the first one.
        out: folder for the figures.
        matrices: attention matrices per layer whose rank is computed; 0 for no ranks.
        length: cut longer inputs to this many tokens, for maps and ranks.
        index: example of the test split that the maps show.
        which: checkpoint.
        data_root: folder of the prepared data sets; that of the run if not given.
    """
    from mgk.inspect.report import write_figures
    from mgk.inspect.runs import Run

    if not runs:
        raise ValueError("RUNS: expected at least one folder of a run, got none")
    if matrices < 0:
        raise ValueError(f"--matrices: expected at least 0, got {matrices}")
    opened = [Run.open(run, which=which, data_root=data_root) for run in runs]
    write_figures(opened, out, matrices=matrices, length=length, index=index)


def explore(
    runs: Positional[tuple[Path, ...]],
    hf: tuple[str, ...] = (),
    text: str | None = None,
    input: Path | None = None,
    out: Path = Path("explore.html"),
    index: int | None = None,
    length: int | None = None,
    which: Literal["best", "last"] = "best",
    data_root: Path | None = None,
) -> None:
    """Write one HTML page that shows the attention of some models: mgk explore RUN [RUN ...]

    The page needs no server and no network, and shows two models side by side. For a folder of `mgk compare`, the page
    has its report above the explorer. Without a text, it shows an example of the test split.

    mgk explore --hf MODEL --text "..." shows any Transformers model of text, by the weights that it returns.

    In Python: `mgk.inspect.report.explore_page([Run.open("runs/a")], text="...").write("page.html")`, or
    `mgk.inspect.page` for any arrays.

    Args:
        runs: folders of runs, or one folder of a comparison.
        hf: Transformers models, folders or names on the hub.
        text: input text of the models.
        input: file with the input text.
        out: file to write.
        index: example of the test split, if there is no text; by default one that is long, but not too long to read.
        length: cut the input to this many tokens.
        which: checkpoint.
        data_root: folder of the prepared data sets; that of the run if not given.
    """
    from mgk.inspect.report import comparison_page
    from mgk.inspect.runs import Run, is_transformers

    hf = (*hf, *(str(path) for path in runs if is_transformers(path)))
    runs = tuple(path for path in runs if not is_transformers(path))
    if not runs and not hf:
        raise ValueError("RUNS: expected at least one folder of a run, or --hf MODEL, got none")
    if text is not None and input is not None:
        raise ValueError("--text, --input: expected one of them, got both")
    if input is not None:
        text = input.read_text(encoding="utf-8", errors="replace")
    if hf and text is None:
        raise ValueError("--text: expected the input of the Transformers model (or --input FILE), got none")
    if len(runs) == 1 and not hf and (runs[0] / "comparison.json").exists():
        page = comparison_page(runs[0], text=text, data_root=data_root)
    else:
        opened = [Run.open(run, which=which, data_root=data_root) for run in runs]
        page = _page(opened, hf, text, index, length)
    written = page.write(out)
    print(f"{written} ({written.stat().st_size / 1e6:.1f} MB): open it in a browser")


def _page(runs: list[Run], names: tuple[str, ...], text: str | None, index: int | None, length: int | None) -> Page:
    """Create a page of runs and Transformers models, and show the progress."""
    from mgk.inspect.report import explore_page
    from mgk.train.progress import Progress

    others = []
    if names:
        import mgk.hf  # noqa: F401  # registers the models of mgk
        from mgk.inspect.pretrained import pretrained_model
        from mgk.merge.sums import check_sums

        for name in names:
            check_sums(Path(name))
        others = [pretrained_model(name, text or "", length=length) for name in names]
        if len({model.name for model in others}) < len(others):  # folders of the same name: show where they are
            others = [replace(model, name=name) for model, name in zip(others, names, strict=True)]
    layers = sum(run.config.model.layers for run in runs) + sum(len(model.layers) for model in others)
    with Progress("explore", layers) as progress:
        return explore_page(
            runs,
            others=others,
            text=text,
            index=index,
            length=length,
            progress=lambda done, total: progress.show(done),
        )
