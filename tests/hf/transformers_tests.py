"""Run Transformers' own model tests on the classes of mgk.hf: python -m tests.hf.transformers_tests [OPTIONS OF PYTEST]

The tests are not in the package but in its source distribution. This command fetches that with pip, in the version that
is installed, into a temporary folder; with MGK_TRANSFORMERS_TESTS=FOLDER it reads an unpacked one. The distribution has
the common tests of models (`ModelTesterMixin`), but not those of generation and export: `tests/hf` has its own.

EXPECTED lists the tests that may fail, and why. Another failure makes the command fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

# (pattern of the tests' class, pattern of the test's name): why it may fail.
EXPECTED = {
    ("language|classifier", "test_model_get_set_embeddings"): (
        "the output layer of a tied model is a module without a weight of its own, no nn.Linear"
    ),
    ("", "test_model_weights_reload_no_missing_tied_weights"): (
        "it replaces the weights of a folder, which the folder's checksums notice: an error is intended"
    ),
    ("language", "test_generation_tester_mixin_inheritance"): "the source distribution lacks the tests of generation",
}
# Modules that the common tests import, and that are not in the distribution.
MISSING = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}
SETTINGS = "[pytest]\nfilterwarnings = ignore\naddopts = -q -p no:cacheprovider\n"


def main() -> int:
    """Fetch the tests, run them, and print the failures with the reasons that are known."""
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        given = os.environ.get("MGK_TRANSFORMERS_TESTS")
        complete(Path(given) if given else fetched(work), work / "tests_of_transformers")
        (work / "pytest.ini").write_text(SETTINGS)
        path = os.pathsep.join([str(work), str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
        report = work / "report.xml"
        cases = root / "tests/hf/transformers_cases.py"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-c", work / "pytest.ini", "--noconftest", cases, f"--junitxml={report}",
             "--tb=short", *sys.argv[1:]],
            env=os.environ | {"PYTHONPATH": path}, check=False,
        )  # fmt: skip
        return told(report)


def fetched(work: Path) -> Path:
    """Download and unpack the source distribution of the installed version."""
    name = f"transformers-{version('transformers')}"
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", work,
         name.replace("-", "==", 1)],
        check=True,
    )  # fmt: skip
    with tarfile.open(work / f"{name}.tar.gz") as archive:
        archive.extractall(work, filter="data")
    return work / name


def complete(source: Path, tests: Path) -> None:
    """Copy the tests, and add empty mixins in the place of the modules that they import and do not bring."""
    tests.mkdir()
    for path in (source / "tests").glob("*.py"):
        (tests / path.name).write_text(path.read_text())
    (tests / "__init__.py").touch()
    for name, mixin in MISSING.items():
        folder = (tests / name).parent
        folder.mkdir()
        (folder / "__init__.py").touch()
        (tests / name).write_text(f"class {mixin}:\n    pass\n")


def told(report: Path) -> int:
    """Print how many tests passed and which failed; the result is the number of failures without a reason."""
    counts: Counter[str] = Counter()
    wrong = []
    for case in ElementTree.parse(report).iter("testcase"):
        kind, name = (case.get("classname") or "").rsplit(".", 1)[-1], case.get("name") or ""
        state = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        if state in ("failure", "error"):
            reasons = [why for (one, two), why in EXPECTED.items() if re.search(one, kind) and re.fullmatch(two, name)]
            state = "expected failure" if reasons else "failure"
            if not reasons:
                wrong.append(f"{kind}::{name}")
        counts[state] += 1
    for name in wrong:
        print("FAILED", name)
    print(", ".join(f"{count} {state}" for state, count in counts.most_common()))
    return min(len(wrong), 100)


if __name__ == "__main__":
    sys.exit(main())
