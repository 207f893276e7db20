"""The README is true: Python blocks run, commands parse, and those from data to figures run at small sizes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mgk import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]


def test_readme_has_code_and_commands_to_check() -> None:
    assert len(blocks("python")) >= 2
    assert {shlex.split(line)[0] for line in COMMANDS} == {"make", "mgk", "pip", "python"}
    assert len(re.findall(r"^```\w", README, re.MULTILINE)) == len(blocks("python")) + len(blocks("sh"))


def test_python_blocks_run_and_shapes_are_as_their_comments_say() -> None:
    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    sizes = {name: namespace[name] for name in "BHMND"}
    for name, comment in re.findall(r"^(\w+) = .*# \(([\w,]+)\)", "\n".join(blocks("python")), re.MULTILINE):
        result = namespace[name]
        assert isinstance(result, torch.Tensor)
        assert tuple(result.shape) == tuple(sizes[axis] for axis in comment.split(",")), name


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist(line: str) -> None:
    program, *arguments = shlex.split(line, comments=True)
    if program == "mgk":
        assert callable(cli.parse(arguments))
    elif program == "make":
        if shutil.which("make") is None:
            pytest.skip("make is not installed")
        subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
    elif program == "python":
        assert find_spec(arguments[1]) is not None
    else:
        assert program == "pip"
        assert arguments[0] == "install"
        path, extras = re.fullmatch(r"([^\[]+)(?:\[(.+)\])?", arguments[-1]).groups()  # type: ignore[union-attr]
        project = tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]
        assert set(extras.split(",") if extras else ()) <= set(project["optional-dependencies"])


# Options that make the commands of the README small; they are appended to each command.
SMALL = shlex.split("--data.options sizes=[24,8,8] lengths=[5,20] --data.batch 4 --steps 2 --optimiser.warmup 1")
APPENDED = {
    "data": ["--sizes", "24", "8", "8", "--lengths", "5", "20"],
    "train": SMALL,
    "compare": [*SMALL, "--eval-batches", "1"],
    "eval": [],
    "explore": [],
    "figures": ["--length", "16"],
    "convert": [],
}


def test_the_commands_from_data_to_figures_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MGK_DATA", str(tmp_path / "data"))
    walk = [shlex.split(line)[1:] for line in COMMANDS if line.startswith("mgk") and line.split()[1] in APPENDED]
    assert [command[0] for command in walk] == ["data", "train", "eval", "compare", "explore", "figures", "convert"]
    for command in walk:
        assert cli.main([*command, *APPENDED[command[0]]]) == 0, (command, capsys.readouterr().err)
    assert "smgk:4" in capsys.readouterr().out
    assert (tmp_path / "page.html").read_text().startswith("<!")
    assert list((tmp_path / "figures").glob("*.svg"))


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            path = document.parent / name if name else document
            assert path.exists(), target
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in map(slug, headings), target
