"""The wheel and the source distribution: what is in them, and that what is in them works."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import mgk

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, and a wheel built from it, without compiled kernels: to compile them takes a while."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", out, ROOT],
        check=True, capture_output=True, env=os.environ | {"MGK_NATIVE": "skip"},
    )  # fmt: skip
    return out


def test_the_wheel_works_alone(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert {name.split("/")[0] for name in names} == {"mgk", f"mgk-{mgk.__version__}.dist-info"}
    source = ROOT / "src"
    data = {
        path.relative_to(source).as_posix()
        for pattern in ("*.py", "*.typed", "*.html", "*.js", "*.css", "*.cpp", "*.h")
        for path in source.rglob(pattern)
    }
    assert data <= names
    assert wheel.stat().st_size < 5e6
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/smoke.py"], env=environment, cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"mgk {mgk.__version__} in {tmp_path / 'installed' / 'mgk'}: works, native kernels: no" in done.stdout


def test_the_metadata_is_complete(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        folder = f"mgk-{mgk.__version__}.dist-info"
        found: Any = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        scripts = archive.read(f"{folder}/entry_points.txt").decode()
    assert (found["Name"], found["Version"], found["License-Expression"]) == ("mgk", mgk.__version__, "Apache-2.0")
    assert found["Requires-Python"] == ">=3.11"
    assert {"train", "hf", "plot", "data", "gpu"} <= set(found.get_all("Provides-Extra"))
    assert [line for line in found.get_all("Requires-Dist") if "extra ==" not in line] == ["numpy", "torch>=2.11"]
    assert {"Classifier", "Keywords", "Project-URL", "Summary", "Author"} <= set(found.keys())
    assert "mgk = mgk.cli:main" in scripts


def test_the_source_distribution_holds_what_the_wheel_is_built_from(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hatch_build.py", "pyproject.toml", "LICENSE", "README.md", "src/mgk/ops/native/attention.cpp"} <= names
    assert not {name.split("/")[0] for name in names} & {"weights", "results", "tests", "docs"}


def test_the_version_has_an_entry_in_the_changelog() -> None:
    assert f"## [{mgk.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_what_exists(path: Path) -> None:
    flow = yaml.safe_load(path.read_text())
    assert flow["jobs"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()
    assert set(re.findall(r"\bmake ([\w-]+)", text)) <= targets
    for name in re.findall(r"(?:tests|\.ci|\.github)/[\w/.-]+", text):
        assert (ROOT / name).exists(), name
