"""Folders are what was written: damage is noticed, nothing half-written is left, nothing in them is run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mgk.cli.hf import generate
from mgk.hf import convert, hf_to_run, run_to_hf
from mgk.hf.card import model_card, plain
from mgk.hf.generate import load_for_generation
from mgk.merge import merge_heads
from mgk.merge.sums import SUMS, check_sums
from mgk.train.sample import visible
from tests.disk import flipped, small_files
from tests.hf.common import foreign, make

OLD = Path(__file__).parent.parent / "fixtures" / "v0.1.0"
"""Trained runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with its tokenizer, state and record."""
    return run_to_hf(OLD / "trained/language", tmp_path_factory.mktemp("x") / "hf", state=True, data_root=OLD / "data")


def copied(path: Path, target: Path) -> Path:
    return Path(shutil.copytree(path, target))


def test_any_flipped_bit_is_noticed(folder: Path, tmp_path: Path) -> None:
    """In weights, configuration, tokenizer, optimiser state, record and the checksums themselves; the card is prose."""
    here = copied(folder, tmp_path / "hf")
    files = [path for path in sorted(here.rglob("*")) if path.is_file() and path.name != "README.md"]
    assert {path.name for path in files} >= {"model.safetensors", "config.json", "tokenizer.json", "state.pt", SUMS}
    for seed in range(100):
        path = files[seed % len(files)]
        content = path.read_bytes()
        with flipped(path, seed):
            if path.name == SUMS:  # a name that no file has is no file to compare: the others still are
                try:
                    check_sums(here, deep=True)
                except OSError:
                    pass
                else:
                    assert set(json.loads(path.read_text())["files"]) != set(json.loads(content)["files"])
            else:
                with pytest.raises(OSError, match=rf"{path.name}: damaged or changed: .*remove {SUMS}"):
                    check_sums(here, deep=True)
    check_sums(here, deep=True)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_folder_is_not_loaded(folder: Path, name: str, tmp_path: Path) -> None:
    here = copied(folder, tmp_path / "hf")
    content = bytearray((here / name).read_bytes())
    content[-2 if name == "model.safetensors" else content.index(b"0")] ^= 1
    (here / name).write_bytes(content)
    with pytest.raises(OSError, match=f"{name}: damaged or changed"):
        load_for_generation(here)
    with pytest.raises(OSError, match=f"{name}: damaged or changed"):
        hf_to_run(here, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_merged_models_have_checksums_too_and_saving_again_replaces_them(tmp_path: Path) -> None:
    model, batch = foreign("gpt2")
    merged, _ = merge_heads(model.float(), [batch])
    merged.save_pretrained(tmp_path)
    with torch.no_grad():
        next(merged.parameters()).add_(1)
    merged.save_pretrained(tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    with pytest.raises(OSError, match=r"model.safetensors: damaged or changed"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_checksum_file_names_only_files_of_its_folder(tmp_path: Path) -> None:
    make("classifier").save_pretrained(tmp_path)
    for name in ("../secret", "/etc/passwd"):
        (tmp_path / SUMS).write_text(json.dumps({"files": {name: {}}}))
        with pytest.raises(OSError, match="expected names of files in this folder"):
            check_sums(tmp_path)


@pytest.mark.parametrize("most", [400, 5000, 20_000])  # in the configuration, the weights, the state
def test_a_full_disk_leaves_nothing(most: int, folder: Path, tmp_path: Path) -> None:
    run, out = OLD / "trained/language", tmp_path / "out"
    with small_files(most), pytest.raises(OSError, match=r"out: cannot be written \(.*nothing was left"):
        run_to_hf(run, out, state=True, data_root=OLD / "data")
    with small_files(most), pytest.raises(OSError, match=r"out: cannot be written \(.*nothing was left"):
        hf_to_run(folder, out)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), convert.writing(tmp_path / "out"):
        (tmp_path / "nothing").read_text()


def test_a_broken_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    here = copied(folder, tmp_path / "hf")
    (here / SUMS).unlink()
    (here / "tokenizer.json").write_text("{{")
    with pytest.raises(OSError, match=rf"{here}: its tokenizer cannot be read \(Expecting property name"):
        load_for_generation(here)


@pytest.mark.parametrize("known", [True, False])
def test_code_beside_a_model_is_neither_run_nor_asked_about(known: bool, tmp_path: Path) -> None:
    make("language").save_pretrained(tmp_path)
    (tmp_path / SUMS).unlink()
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]}
    told = json.loads((tmp_path / "config.json").read_text()) | {"auto_map": code}
    told |= {} if known else {"model_type": "unheard-of"}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": code}))
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    with pytest.raises(Exception, match=r"trust_remote_code|tokenizer|unheard-of"):
        load_for_generation(tmp_path)


def record(text: str) -> dict[str, Any]:
    """The record of a run in which every free text is `text`."""
    settings = json.loads((OLD / "trained/language/config.json").read_text())
    settings |= {"recipe": text, "data": settings["data"] | {"name": text}}
    start = {"versions": {text: text}, "commit": text, "gpu": text, "machine": text}
    result = {"best_step": 4, "valid": {text: 1.0}, "test": {text: 1.0}}
    return {"config": settings, "result": result, "starts": [start]}


@pytest.mark.parametrize("text", ["a\n---\ntags: evil\n", "<img src=x onerror=alert(1)>", "[x](javascript:1)", "| a |"])
def test_the_card_shows_any_text_as_text(text: str) -> None:
    config = make("classifier").config
    card, tame = (model_card(config, 7, record(each)) for each in (text, "tame"))
    assert len(card.splitlines()) == len(tame.splitlines())
    head, body = card.split("\n---\n", 1)
    assert [line.split(":")[0] for line in head.splitlines() if ":" in line[:14]] == [
        "library_name", "pipeline_tag", "tags", "datasets",
    ]  # fmt: skip
    assert json.loads(head.splitlines()[-1].removeprefix("- ")) == text
    assert "<img" not in body
    assert "[x](" not in body.replace("\\[", "")
    assert [line.count(" | ") for line in body.splitlines() if line.startswith("| ")] == [
        line.count(" | ") for line in tame.split("\n---\n", 1)[1].splitlines() if line.startswith("| ")
    ] or "|" in text


def test_plain_keeps_ordinary_names() -> None:
    for name in ("lra-text", "NVIDIA H200, 139 GiB", "2.13.0+cpu", "torch (nightly)"):
        assert plain(name) == name


def test_control_characters_are_shown_as_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert visible("a\tb\n\x1b[2J\x07\x9b é") == "a\tb\n\\x1b[2J\\x07\\x9b é"

    def stream(model: Any, tokenizer: Any, prompt: str, shown: Any, **_: Any) -> None:
        shown("\x1b]0;owned\x07")

    monkeypatch.setattr("mgk.hf.generate.stream", stream)
    generate(OLD / "trained/language", device="cpu", data_root=OLD / "data")
    assert capsys.readouterr().out == "\\x1b]0;owned\\x07\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("mgk_run/checkpoint.json", "{", r"checkpoint.json: cannot be read \(Expecting property name"),
        ("mgk_run/checkpoint.json", "[]", r"checkpoint.json: expected a JSON object, got list"),
        ("mgk_run/state.pt", "nonsense", r"state.pt: damaged, or not the state of a run"),
    ],
)
def test_a_damaged_record_is_named(folder: Path, file: str, content: str, message: str, tmp_path: Path) -> None:
    here = copied(folder, tmp_path / "hf")
    (here / SUMS).unlink()
    (here / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        hf_to_run(here, tmp_path / "run")
