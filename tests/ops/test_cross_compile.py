"""Kernels compile for GPUs that are not here, within their shared memory and with few spilled bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cross_compile

ROOT = Path(__file__).parents[2]
CASES = {
    "sm_80": ["smgk/bf16/32/32/2/200/causal,drop"],
    "sm_89": ["mgk/f16/32/32/2/128/one", "mgk/bf16/128/128/2/128"],
    "sm_90": ["smgk/f32/32/32/2/128/few,page16", "smgk/bf16/32/32/2/128/one,page64"],
    "sm_120": ["prior/bf16/32/32/2/128"],
    "gfx942": ["smgk/bf16/16/16/2/128/drop", "mgk/f32/64/64/2/128/one", "loss/bf16/256/0/0/512"],
}


@pytest.mark.parametrize("target", CASES)
def test_kernels_fit(target: str, tmp_path: Path) -> None:
    """In a process of its own: a process compiles for one target, and without Triton's interpreter."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.cross_compile", target, *CASES[target]]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    setting = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(command, env=setting, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernel" in done.stdout


def test_the_list_has_every_family_type_and_width() -> None:
    cases = [case.split("/") for case in cross_compile.cases()]
    assert len(cases) == len({tuple(case) for case in cases})
    for family in ("smgk", "mgk"):
        for dtype in cross_compile.DTYPES:
            assert {int(case[2]) for case in cases if case[:2] == [family, dtype]} >= set(cross_compile.WIDTHS)
    flags = {flag for case in cases for flag in (case[6].split(",") if len(case) > 6 else ())}
    assert flags == {
        "causal", "hard", "mask", "drop", "var", "tf32", "one", "few", "window", "page16", "page64", "softmax",
    }  # fmt: skip


def test_the_recorded_kernels_are_within_their_limits() -> None:
    """Those of results/cross-compile.json: nothing is over the shared memory of a GPU, and little is spilled."""
    rows = cross_compile.read_rows()
    assert {target for target, _ in rows} == set(cross_compile.TARGETS)
    assert [problem for job, row in rows.items() for problem in cross_compile.problems(*job, row)] == []
    assert len({kernel for row in rows.values() for kernel in row.get("kernels", {})}) > 20


def test_what_is_over_a_limit_is_a_problem() -> None:
    kernels = {"kernels": {"shifted.key_kernel": [10**6, 255, 513]}}
    found = cross_compile.problems("sm_80", "smgk/bf16/64/64/2/512", kernels)
    assert ["shared memory" in found[0], "513 bytes spilled" in found[1]] == [True, True]
    assert cross_compile.problems("sm_80", "mgk/f32/256/256/4/512", {"error": "ValueError: query: no tile for 4"}) == []
    assert cross_compile.problems("sm_80", "mgk/f32/64/64/4/512", {"error": "KeyError: 64"})
