"""The documentation site builds without a warning, every link and anchor leads somewhere, and nothing is missing."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from tests.pages import PAGES, ROOT

for name in ("mkdocs", "material", "mkdocstrings_handlers.python", "latex2mathml"):
    pytest.importorskip(name, reason="the packages of the extra `docs` are not installed")

PUBLIC = ("ops", "nn", "models", "data", "train", "recipes", "hf", "merge", "inspect")


class Anchors(HTMLParser):
    """The ids, the targets of links and the files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if identifier := found.get("id"):
            self.ids.add(identifier)
        self.targets += [target for key in ("href", "src") if (target := found.get(key))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; mkdocs.yml says that a warning is an error (with --quiet it would not be)."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Anchors]:
    return {path: Anchors(path.read_text()) for path in site.rglob("*.html")}


def test_every_link_and_anchor_leads_somewhere(site: Path, pages: dict[Path, Anchors]) -> None:
    wrong = []
    for page, found in pages.items():
        for target in found.targets:
            parts = urlsplit(html.unescape(target))
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if path.is_dir():
                path /= "index.html"
            if not path.exists() or (parts.fragment and path in pages and parts.fragment not in pages[path].ids):
                wrong.append(f"{page.relative_to(site)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_it_asks_no_other_server_for_anything(pages: dict[Path, Anchors]) -> None:
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not [address for address in loaded if "://127.0.0.1" not in address], page.name


def test_every_page_of_the_repository_is_there(site: Path) -> None:
    names = {"README": "index", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}
    for page in PAGES:
        path = page.relative_to(ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT).with_suffix(".html")
        assert (site / path.with_stem(names.get(path.stem, path.stem))).exists(), path


def test_every_public_name_is_in_the_reference(pages: dict[Path, Anchors], hooks: ModuleType) -> None:
    listed = {name for path, found in pages.items() if path.parent.name == "api" for name in found.ids}
    names = {f"mgk.{package}.{name}" for package in PUBLIC for name in hooks.public(package)}
    same = {f"mgk.hf.{name}" for name in hooks.public("merge")}  # listed as names of mgk.merge
    assert len(names) > 100
    assert names - listed - same == set()


def test_formulas_are_formulas(site: Path) -> None:
    text = (site / "math.html").read_text()
    assert text.count("<math") > 300
    assert "arithmatex" not in text
    assert not re.search(r"<m\w+[^>]*>\\", text)  # a command that the converter does not know
