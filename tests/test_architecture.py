"""The import contract of the package, and the names on the page that describes it, docs/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "mgk"

BASE = ("variants", "files", "tables", "intervals", "environment")
CORE = (*BASE, "ops", "nn", "mgk")  # "mgk" is src/mgk/__init__.py, which re-exports ops and nn
TRAINING = (*CORE, "models", "data", "train")
# What each package or top-level module of mgk may import.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(BASE, ()),
    "tables": ("files",),
    "ops": BASE,
    "nn": (*BASE, "ops"),
    "mgk": ("ops", "nn"),
    "models": CORE,
    "data": (*CORE, "models"),
    "train": (*CORE, "models", "data"),
    "recipes": TRAINING,
    "inspect": TRAINING,
    "merge": TRAINING,
    "hf": (*TRAINING, "merge"),
    "cli": (*TRAINING, "recipes", "inspect", "merge", "hf"),
    "__main__": ("cli",),
}
# Libraries that `import mgk` must not load.
OPTIONAL = {
    "triton", "transformers", "matplotlib", "lightning", "lightning_fabric", "rich", "safetensors", "fla",
    "datasets",
}  # fmt: skip


def package_of(path: Path) -> str:
    """Return the package or top-level module that a file of the source belongs to."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "mgk" if first == "__init__" else first


def imported_by(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the dotted name and the line of every import of a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: expected an absolute import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def edges() -> Iterator[tuple[str, str, str]]:
    """Yield (importing package, imported package, place) for imports between packages of mgk."""
    for path in sorted(SOURCE.rglob("*.py")):
        package = package_of(path)
        for name, line in imported_by(path):
            top, *rest = name.split(".")
            # `import mgk` and `from mgk import smgk_attention` import mgk/__init__.py itself.
            target = rest[0] if rest and rest[0] in MAY_IMPORT else "mgk"
            if top == "mgk" and target != package:
                yield package, target, f"{path.relative_to(ROOT)}:{line}"


def test_every_package_has_its_place_in_the_contract() -> None:
    found = {package_of(path) for path in SOURCE.rglob("*.py")}
    assert found == set(MAY_IMPORT)


def test_imports_point_down() -> None:
    wrong = [f"{place}: {package} imports {target}" for package, target, place in edges()
             if target not in MAY_IMPORT[package]]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_the_contract_has_no_cycles() -> None:
    below: dict[str, set[str]] = {}
    for name, targets in MAY_IMPORT.items():
        assert set(targets) <= set(below), f"{name} may import a package that is not listed before it"
        below[name] = set(targets)


@pytest.mark.parametrize("outside", ["benchmarks", "experiments", "tests"])
def test_the_package_imports_nothing_outside_of_it(outside: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for name, line in imported_by(path)
        if name.split(".")[0] == outside
    ]
    assert not wrong, "\n".join(wrong)


def test_import_loads_no_optional_library() -> None:
    program = "import sys, mgk; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not OPTIONAL & set(done.stdout.split())


# docs/architecture.md names functions as `path: function` or `path: Class.method`, several separated by commas.
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.findall(r"`([\w/]+\.py): ([\w., ]+)`", PAGE)


def defined_in(path: Path) -> set[str]:
    """Return the functions, classes, methods and module-level names that a file defines."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_the_page_names_functions() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("path", "names"), sorted(set(NAMED)))
def test_functions_named_on_the_page_exist(path: str, names: str) -> None:
    file = next((base / path for base in (SOURCE, ROOT) if (base / path).exists()), None)
    assert file is not None, path
    assert set(names.split(", ")) <= defined_in(file)
