"""What the documentation shows works: its Python runs, its commands run at small sizes, and its links lead somewhere.

A block that is not run says why, in a comment before it: `<!-- not run: needs several GPUs -->`. Its commands are
parsed all the same.
"""

from __future__ import annotations

import random
import re
import shlex
import shutil
import subprocess
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mgk import cli
from tests.pages import PAGES, ROOT, Block, read_blocks

pytest.importorskip("tokenizers")
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
SHELL = [block for block in BLOCKS if block.language == "sh"]
PYTHON = [block for block in BLOCKS if block.language == "python"]
LANGUAGES = {"sh", "python", "bibtex", "text", ""}
# Options that make a command small, by the words that it begins with. They are added to what the page shows.
LISTOPS = "--data.options sizes=[24,8,8] lengths=[5,20] --data.batch 4 --steps 2 --optimiser.warmup 1 --workers 0"
LANGUAGE = (
    "--model.layers 1 --model.width 16 --model.hidden 16 --model.head-dim 8 --model.max-length 16 --data.batch 2 "
    "--steps 2 --optimiser.warmup 1 --eval-every 2 --eval-batches 1 --workers 0"
)
SMALL = {
    "data prepare listops": "--sizes 24 8 8 --lengths 5 20",
    "train lra-listops": LISTOPS,
    "compare lra-listops": f"{LISTOPS} --eval-batches 1 --seeds 1",
    "train lm": LANGUAGE,
    "compare lm": f"{LANGUAGE} --seeds 1",
    "figures": "--length 16",
    "generate": "--tokens 4",
    "convert --from": "--finetune 2",
    "bench": "--shapes 1,2,16,8 --rounds 1 --device cpu",
}


def pages_with(blocks: list[Block]) -> list[Path]:
    return list(dict.fromkeys(block.page for block in blocks if not block.reason))


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_code_is_marked_as_what_it_is(block: Block) -> None:
    """Otherwise the tests below would not see it."""
    assert block.language in LANGUAGES
    if block.language not in ("sh", "python"):
        assert not re.search(r"^(\$ )?(mgk|pip|python|make|import|from) ", block.text, re.MULTILINE)


@pytest.mark.parametrize("page", pages_with(PYTHON), ids=title)
def test_python_runs_and_shapes_are_as_comments_say(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in PYTHON:
        if block.page == page and not block.reason:
            exec(compile(block.text, str(block), "exec"), names)
            printed = capsys.readouterr().out.split()
            assert re.findall(r"^ *print\(.*\)  # (\S+)$", block.text, re.MULTILINE) in ([], printed)
            for name, comment in re.findall(r"^(\w+) = .*# \(([BHMND,]+)\)", block.text, re.MULTILINE):
                result = names[name]
                assert isinstance(result, torch.Tensor)
                assert tuple(result.shape) == tuple(names[axis] for axis in comment.split(",")), name


COMMANDS = [(block, command) for block in SHELL for command in block.commands]


@pytest.mark.parametrize(("block", "command"), COMMANDS, ids=lambda value: str(value)[:60])
def test_commands_exist(block: Block, command: str) -> None:
    program, *words = shlex.split(command)
    if program in ("torchrun", "srun"):
        words = words[words.index("-m") :]
        program = "python"
    if program == "python" and words[:2] == ["-m", "mgk"]:
        program, words = "mgk", words[2:]
    if program == "mgk":
        assert callable(cli.parse(words))
    elif program == "make":
        if shutil.which("make") is None:
            pytest.skip("make is not installed")
        subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)
    elif program == "python" and words[0] == "-m":
        check_module(words[1], words[2:])
    elif program == "python":
        assert (ROOT / words[0]).exists()
    elif program == "pip":
        check_extras(words)
    else:
        assert re.fullmatch(r"export \w+=.*|hf upload .*", command), command


def check_module(name: str, words: list[str]) -> None:
    """The module of a command exists, and its source has every option of the command."""
    found = find_spec(name)
    assert found is not None
    assert found.origin is not None
    origin = Path(found.origin)
    source = "".join(path.read_text() for path in (origin.parent.glob("*.py") if "__" in origin.name else [origin]))
    assert all(f'"{word}"' in source for word in words if word.startswith("--"))


def check_extras(words: list[str]) -> None:
    assert words[0] == "install"
    extras = re.search(r"\[(.+)\]", words[-1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.group(1).split(",") if extras else ()) <= set(project["optional-dependencies"])


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a small enwik8.zip, and a place for prepared data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MGK_DATA", str(tmp_path / "data"))
    Path("weights").symlink_to(ROOT / "weights")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(2000)]
    with zipfile.ZipFile("enwik8.zip", "w") as archive:
        archive.writestr("enwik8", "\n".join(" ".join(draw.choices(words, k=10)) for _ in range(2000)))
    return tmp_path


@pytest.mark.parametrize("page", pages_with(SHELL), ids=title)
def test_commands_run(page: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in SHELL:
        for command in block.commands if block.page == page and not block.reason else ():
            program, *words = shlex.split(command)
            if program == "mgk":
                added = next((SMALL[start] for start in sorted(SMALL) if " ".join(words).startswith(start)), "")
                assert cli.main([*words, *shlex.split(added)]) == 0, (command, capsys.readouterr().err)


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), target
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in map(slug, headings), target


def test_messages_in_the_questions_are_those_of_the_code() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    found = re.findall(r"^\*\*`(.+?)`\*\*", (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE)
    assert len(found) >= 4
    assert [message for message in found if message not in source] == []
