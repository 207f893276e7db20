"""Tables in Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mgk.files import write_text

SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A table of strings. Columns in `left` are aligned to the left, the others to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    left: Sequence[int] = (0,)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"rows: expected {len(self.header)} cells as in the header, got {len(row)}: {row}")

    def markdown(self) -> str:
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        columns = []
        for number, cells in enumerate(zip(*rows, strict=True)):
            width, left = max(map(len, cells)), number in self.left
            head, *rest = (f" {cell.ljust(width) if left else cell.rjust(width)} " for cell in cells)
            columns.append([head, "-" * (width + 1) + ("-" if left else ":"), *rest])
        lines = [f"|{'|'.join(line)}|" for line in zip(*columns, strict=True)]
        return "\n".join([*([self.caption, ""] if self.caption else []), *lines]) + "\n"

    def latex(self) -> str:
        """The table for LaTeX with the package booktabs."""
        lines = [" & ".join(map(escape, row)) + r" \\" for row in (self.header, *self.rows)]
        columns = "".join("l" if number in self.left else "r" for number in range(len(self.header)))
        body = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
        tabular = f"\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}\n"
        if not self.caption:
            return tabular
        return f"\\begin{{table}}\n\\centering\n\\caption{{{escape(self.caption)}}}\n{tabular}\\end{{table}}\n"

    def write(self, stem: str | Path) -> list[Path]:
        """Write STEM.md and STEM.tex."""
        stem = Path(stem)
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_name(stem.name + ending) for ending in (".md", ".tex")]
        for path, text in zip(paths, (self.markdown(), self.latex()), strict=True):
            write_text(path, text)
        return paths


def escape(text: str) -> str:
    return "".join(SPECIAL.get(letter, letter) for letter in text)
