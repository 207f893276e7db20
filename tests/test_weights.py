"""The weights in the repository: small, in a format without code, and they work as their page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from mgk import hf
from mgk.cli import main
from tests.recipes.common import ROOT, TEXT

FOLDERS = sorted(path.parent for path in (ROOT / "weights").glob("*/config.json"))
WORDS = set(re.findall("[a-z]+", TEXT.lower()))
MEGABYTES = 5.0


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_a_folder_is_small_and_complete(folder: Path) -> None:
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"README.md", "config.json", "mgk_sums.json", "model.safetensors", "tokenizer.json"} <= files
    endings = {path.rpartition(".")[2] for path in files - {"modeling_mgk.py"}}  # which imports mgk, for Transformers
    assert endings == {"md", "json", "jsonl", "safetensors"}
    assert sum((folder / name).stat().st_size for name in files) < MEGABYTES * 1e6
    with safe_open(folder / "model.safetensors", "pt") as weights:
        parameters = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118  # no dictionary
    result = json.loads((folder / "mgk_run/result.json").read_text())
    assert result["parameters"] == parameters
    page = (ROOT / "weights/README.md").read_text()
    bits = result["test"]["loss"] / 0.6931471805599453
    assert re.search(rf"\| \[{folder.name}\].*\| {parameters:,} \| {bits:.3f} \|", page)
    for name in ("README.md", "mgk_run/run.json"):
        assert "/tmp" not in (folder / name).read_text()


def test_its_text_is_made_of_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder), "--prompt", "The ", "--tokens", "200", "--no-sample", "--device", "cpu"]) == 0
    words = re.findall("[a-z]+", capsys.readouterr().out.lower())
    assert len(words) > 20
    assert sum(word in WORDS for word in words) > len(words) / 3  # the licence knows common words


def test_the_explorer_shows_it(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["explore", str(folder), "--text", "The river flows.", "--out", str(page)]) == 0
    assert page.stat().st_size > 50_000


def test_it_predicts_english(folder: Path) -> None:
    """A text it has not seen, at fewer bits per byte than a code that knows no English."""
    import torch

    model = hf.MGKForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([list(TEXT[3000:3256].encode())])
    with torch.no_grad():
        loss = float(model(input_ids=tokens, labels=tokens).loss)
    assert loss / 0.6931471805599453 < 3.0
