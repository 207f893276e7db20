"""Run a notebook without Jupyter: `python -m tests.notebook examples/explore.ipynb` stores its outputs in it."""

from __future__ import annotations

import ast
import base64
import io
import json
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the cells in order, in one namespace, and return the notebook with their outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells: list[dict[str, Any]] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number = 1 + sum(done["cell_type"] == "code" for done in cells)
            cell = cell | {"execution_count": number, "outputs": outputs("".join(cell["source"]), names, number)}
        cells.append(cell)
    return notebook | {"cells": cells}


def outputs(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell; return what it prints, and its last expression as a picture or as text."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None
    found: list[dict[str, Any]] = []
    if text := printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        data: dict[str, Any] = {"text/plain": [repr(value)]}
        if hasattr(value, "savefig"):
            picture = io.BytesIO()
            value.savefig(picture, format="png", dpi=80)
            data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
        found.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return found


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        with chdir(path.parent):
            found = run(json.loads(Path(path.name).read_text()))
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
