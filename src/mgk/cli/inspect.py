"""`mgk figures` and `mgk explore`: command-line wrappers of `mgk.inspect.report`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro


def figures(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    out: Path = Path("figures"),
    matrices: int = 1000,
    length: int = 1024,
    index: int = 0,
    which: Literal["best", "last"] = "best",
    data_root: Path | None = None,
) -> None:
    """Draw the paper's figures for some runs: curves, attention maps, ranks, costs and results, as SVG and PNG.

    Tables come as Markdown and LaTeX beside them. Maps and ranks need the data that the runs were trained on.

    In Python: `mgk.inspect.report.write_figures([Run.open("runs/a")], Path("figures"))`; each figure is a function of
    plain arrays in `mgk.inspect.figures`.

    Args:
        runs: folders of runs; the first one's size is that of the cost curves.
        out: where the figures go.
        matrices: attention matrices per layer whose rank is found; 0 leaves ranks out.
        length: longer inputs are cut here, for maps and ranks.
        index: which example of the test split the maps show.
        which: which checkpoint.
        data_root: where prepared data sets are; $MGK_DATA or ~/.cache/mgk/data if not given.
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
    runs: tyro.conf.Positional[tuple[Path, ...]],
    text: str | None = None,
    input: Path | None = None,
    out: Path = Path("explore.html"),
    index: int = 0,
    length: int | None = None,
    which: Literal["best", "last"] = "best",
    data_root: Path | None = None,
) -> None:
    """Write one HTML page on which anyone can look inside the attention of some runs: mgk explore RUN [RUN ...]

    The page needs no server and no network; two models stand side by side. A folder of `mgk compare` gives its report,
    with the explorer at the end. Without a text, an example of the test split is shown.

    In Python: `mgk.inspect.report.explore_page([Run.open("runs/a")], text="...").write("page.html")`; for any arrays,
    `mgk.inspect.page`.

    Args:
        runs: folders of runs, or one of a comparison.
        text: what the models are to read.
        input: a file with what the models are to read.
        out: where the page goes.
        index: which example of the test split, if there is no text.
        length: cut the input to so many tokens.
        which: which checkpoint.
        data_root: where prepared data sets are; $MGK_DATA or ~/.cache/mgk/data if not given.
    """
    from mgk.inspect.report import comparison_page, explore_page
    from mgk.inspect.runs import Run
    from mgk.train.progress import Progress

    if not runs:
        raise ValueError("RUNS: expected at least one folder of a run, got none")
    if text is not None and input is not None:
        raise ValueError("--text, --input: expected one of them, got both")
    if input is not None:
        text = input.read_text(encoding="utf-8", errors="replace")
    if len(runs) == 1 and (runs[0] / "comparison.json").exists():
        written = comparison_page(runs[0], text=text, data_root=data_root).write(out)
    else:
        opened = [Run.open(run, which=which, data_root=data_root) for run in runs]
        with Progress("explore", sum(run.config.model.layers for run in opened)) as progress:
            page = explore_page(
                opened, text=text, index=index, length=length, progress=lambda done, total: progress.show(done)
            )
        written = page.write(out)
    print(f"{written} ({written.stat().st_size / 1e6:.1f} MB): open it in a browser")
