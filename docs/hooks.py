"""Hooks of MkDocs: pages from files outside docs/, formulas as MathML, and examples with their outputs.

The site needs no network when it is read: formulas are converted here, and fonts are those of the reader's system.
"""

from __future__ import annotations

import ast
import html
import io
import json
import posixpath
import re
import textwrap
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Files of the repository that are pages, by their path from the root.
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
ALIASES = {"ModelConfig", "Batch", "RECIPES"}  # public names of types and of a table: nothing to describe
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = ROOT / "examples" / "explore.ipynb"
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.+?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add pages that mkdocs.yml does not name to the last section of the navigation."""
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    new = [path.name for path in sorted(Path(config.docs_dir).glob("*.md")) if path.name not in named]
    section: list[Any] = (config.nav or [{"Project": []}])[-1]["Project"]
    section.extend(new)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/."""
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, content=moved((ROOT / source).read_text(), "", target)))
    for path in EXAMPLES:
        files.append(File.generated(config, f"examples/{path.stem}.md", content=script(path)))
    files.append(File.generated(config, "examples/explore.md", content=notebook(NOTEBOOK)))
    files.append(File.generated(config, "api/cli.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside of docs/ lead to their pages."""
    source = page.file.src_uri
    if source.startswith("api/") and source != "api/cli.md":
        markdown += unlisted(markdown)
    if source in OUTSIDE.values() or source.startswith("examples/"):
        return markdown
    return moved(markdown, posixpath.join("docs", posixpath.dirname(source)), source)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert formulas to MathML."""

    def mathml(match: re.Match[str]) -> str:
        found = str(convert(html.unescape(match[2]).strip(), display="block" if match[1] == "div" else "inline"))
        return found.replace("<mo>&#x0007C;</mo>", '<mo stretchy="false">|</mo>')  # bars as high as text

    return FORMULA.sub(mathml, content)


def public(package: str) -> list[str]:
    """Return `__all__` of a package of mgk, without importing it."""
    body = ast.parse((ROOT / "src" / "mgk" / package / "__init__.py").read_text()).body
    (found,) = (
        node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return [name for name in ast.literal_eval(found) if name not in ALIASES]


def unlisted(markdown: str) -> str:
    """Return entries for public names that a page of the reference does not have, of the packages it is about."""
    listed = set(re.findall(r"^::: mgk\.(\w+)\.(\w+)", markdown, re.MULTILINE))
    names = {name for _, name in listed}
    packages = sorted({package for package, _ in listed})
    more = [f"::: mgk.{package}.{name}\n" for package in packages for name in public(package) if name not in names]
    return "\n".join(["\n## More\n", *more]) if more else ""


def moved(markdown: str, folder: str, target: str) -> str:
    """Rewrite relative links of a file in `folder` of the repository for the page `target` of the site."""

    def rewrite(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        known = OUTSIDE | {f"examples/{path.name}": f"examples/{path.stem}.md" for path in (*EXAMPLES, NOTEBOOK)}
        place = known.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if place is None:
            return match[0]  # MkDocs warns, and a warning is an error
        place = posixpath.relpath(place, posixpath.dirname(target) or ".")
        return f"{match[1]}{place}{match[3] or ''})"

    return LINK.sub(rewrite, markdown)


def script(path: Path) -> str:
    """Return the page of an example: its docstring, with the commands in it as code, and its code."""
    source = path.read_text()
    text = ast.get_docstring(ast.parse(source)) or ""
    text = re.sub(r"(?:^(?:pip|python|torchrun) .*\n?)+", r"```text\n\g<0>\n```\n", text, flags=re.MULTILINE)
    code = source.split('"""', 2)[2].strip()
    return (
        f"# {path.stem.replace('_', ' ').capitalize()}\n\n{text}\n\n`examples/{path.name}`:\n\n```python\n{code}\n```\n"
    )


def commands() -> str:
    """Return the page of the command line: the help of every command."""
    from mgk import cli

    parts = ["# Command line", "The commands need the extra `train`; `mgk COMMAND --help` prints what is shown here."]
    for name in ("", *cli.COMMANDS):
        out = io.StringIO()
        with redirect_stdout(out), suppress(SystemExit):
            action = cli.parse([*filter(None, [name]), "--help"])
            action()
        lines = (textwrap.fill(line, 90) if len(line) > 90 else line for line in out.getvalue().strip().splitlines())
        parts.append(f"## mgk {name}".rstrip() + "\n\n```text\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(parts) + "\n"


def notebook(path: Path) -> str:
    """Return the page of a notebook, with the outputs that are stored in it."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [shown(output) for output in cell.get("outputs", ())]
    return "\n\n".join(part for part in parts if part) + "\n"


def shown(output: dict[str, Any]) -> str:
    """Return an output of a cell as Markdown: a picture, or text."""
    data = output.get("data", {})
    if picture := data.get("image/png"):
        return f"![Output of the cell](data:image/png;base64,{''.join(picture).strip()})"
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```" if text else ""
