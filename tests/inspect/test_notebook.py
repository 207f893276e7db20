"""The code of the example notebook and of the documentation runs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from mgk.inspect import Page

ROOT = Path(__file__).parents[2]


def test_the_notebook_runs_and_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((ROOT / "examples" / "explore.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)  # nothing generated in git
    names: dict[str, Any] = {}
    shown = []
    for source in sources:
        tree = ast.parse("\n".join(line for line in source.splitlines() if not line.startswith("%")))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "notebook", "exec"), names)
        if isinstance(last, ast.Expr):  # what a notebook displays, if it is something
            shown.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))
    assert [type(value) for value in shown if value is not None] == [Figure, Figure, Figure, Page]
    assert "effective heads of 2" in capsys.readouterr().out


def test_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "explorer.md").read_text(encoding="utf-8"), re.S)
    exec(code, {})
    assert (tmp_path / "page.html").stat().st_size > 50_000
