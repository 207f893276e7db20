"""Write the report of an experiment and its figures."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from mgk.files import write_text


def write_report(out: Path, page: str, figures: str, *inputs: object, folder: Path) -> None:
    """Write a page and, if matplotlib is installed, its figures.

    Args:
        out: the page.
        page: its text.
        figures: the module that needs matplotlib; its function `draw(*inputs, folder)` returns what it wrote.
        inputs: what the figures show.
        folder: where they belong.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page)
    print(f"written to {out}")
    try:
        draw = import_module(figures).draw
    except ImportError as error:
        print(f"no figures: {error}")
        return
    for path in draw(*inputs, folder):
        print(f"written to {path}")
