"""The check of exact resumption runs on a CPU, where runs are exact, and reports every kind of difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mgk.data
from benchmarks import exact_resume
from mgk.files import checksum, seal
from mgk.train import checkpoint

CASE = exact_resume.Case("smgk", "eager", 4, "cpu", "bf16-mixed", 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of one case."""
    folder = tmp_path_factory.mktemp("exact")
    mgk.data.prepare("listops", root=folder / "data", **CASE.data)
    row = exact_resume.measure(CASE, folder, folder / "data", exact_resume.work)
    (folder / "row.json").write_text(json.dumps(row))
    return folder


def test_a_run_on_a_cpu_is_resumed_exactly(folder: Path) -> None:
    row = json.loads((folder / "row.json").read_text())
    assert exact_resume.exact(row["repeated"])
    assert exact_resume.exact(row["resumed"])
    assert exact_resume.table([row]).count(" yes |") == 2


@pytest.mark.parametrize("what", ["weights", "state", "log", "best"])
def test_any_other_bit_is_reported(what: str, folder: Path, tmp_path: Path) -> None:
    one = folder / "smgk-eager-straight"
    two = Path(shutil.copytree(one, tmp_path / "two", symlinks=True))
    found = checkpoint.find(two)
    assert found is not None
    if what == "log":
        path = two / "log.jsonl"
        path.write_text(path.read_text().replace('"loss": 2.', '"loss": 3.', 1))
    elif what == "best":
        path = two / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"best_step": 77}))
    elif what == "weights":
        weights = load_file(found / "model.safetensors")
        next(iter(weights.values())).view(torch.int32).view(-1)[0] ^= 1
        save_file(weights, found / "model.safetensors")
    else:
        state = torch.load(found / "state.pt", weights_only=True)
        next(iter(state["optimiser"].values()))["exp_avg"].view(torch.int32).view(-1)[0] ^= 1
        torch.save(state, found / "state.pt")
    if what in ("weights", "state"):  # the checksums are those of the new content
        facts = json.loads((found / "checkpoint.json").read_text())
        facts["files"] = {name: checksum(found / name) for name in facts["files"]}
        (found / "checkpoint.json").write_text(json.dumps(facts | {"sha256": seal(facts)}))
    compared = exact_resume.compare(one, two)
    assert not exact_resume.exact(compared)
    assert compared["weights"] == (what == "weights")
    assert compared["state"] == (what == "state")


def test_zero_and_minus_zero_differ_and_nan_equals_itself() -> None:
    assert not exact_resume.same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert exact_resume.same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))


def test_a_process_that_fails_is_a_row_with_its_message(tmp_path: Path) -> None:
    def fail(arguments: list[str]) -> None:
        raise RuntimeError("exit status 1: out of memory")

    row = exact_resume.measure(CASE, tmp_path, tmp_path, fail)
    assert "out of memory" in exact_resume.table([row])
