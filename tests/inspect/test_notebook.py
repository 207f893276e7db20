"""The code of the example notebook and of the documentation runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebook import run

ROOT = Path(__file__).parents[2]


def test_the_notebook_runs_and_has_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails after a change: python -m tests.notebook examples/explore.ipynb."""
    monkeypatch.chdir(ROOT / "examples")
    text = Path("explore.ipynb").read_text(encoding="utf-8")
    found = run(json.loads(text.replace("steps=400", "steps=2")))

    def shown(notebook: dict[str, Any]) -> list[list[list[str]]]:
        """The kinds of the outputs of every cell."""
        cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
        return [[sorted(output.get("data", {"text": 0})) for output in cell["outputs"]] for cell in cells]

    assert shown(found) == shown(json.loads(text))
    assert sum(["image/png", "text/plain"] in outputs for outputs in shown(found)) == 3


def test_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "explorer.md").read_text(encoding="utf-8"), re.S)
    exec(code, {})
    assert (tmp_path / "page.html").stat().st_size > 50_000
