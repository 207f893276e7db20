"""A preparation that is killed before any change of a file leaves the previous set or none, and nothing else."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from mgk import data
from mgk.data import store
from mgk.data.store import restore
from mgk.files import holder
from tests.killing import every_kill

SPLITS = ("train", "dev", "test")


def source(folder: Path, letter: str) -> Path:
    folder.mkdir()
    (folder / "enwik8").write_text(letter * 100)
    return folder


def content(root: Path) -> str:
    """The letter of the prepared set, or what is wrong with it."""
    try:
        return chr(data.load("enwik8", root=root, verify=True).split("dev").tokens[0])  # type: ignore[union-attr]
    except data.DataError as error:
        return "missing" if "is not prepared" in str(error) else str(error)


@pytest.mark.parametrize("before", ["", "a"])
def test_a_killed_preparation_leaves_no_set_or_the_previous_one(before: str, tmp_path: Path) -> None:
    old, new = source(tmp_path / "a", "a"), source(tmp_path / "b", "b")

    def prepare(root: Path) -> None:
        data.prepare("enwik8", root=root, source=new)

    seen = []
    for root in every_kill(prepare, tmp_path / "killed", begin=lambda root: begin(root, old, before)):
        seen.append(content(root))
        if not before and seen[-1] == "missing":
            assert [path.name for path in root.glob("[!.]*")] == []
        prepare(root)
        assert content(root) == "b"
        assert sorted(path.name for path in root.iterdir()) == [".enwik8.lock", "enwik8"]
    assert len(seen) > 8
    assert set(seen) <= {before or "missing", "b"}
    assert seen[0] == (before or "missing")
    assert sorted(seen, key=lambda text: text == "b") == seen  # once it is there, it stays


def begin(root: Path, old: Path, before: str) -> None:
    if before:
        data.prepare("enwik8", root=root, source=old)


def test_a_set_killed_between_the_renames_is_found_again(tmp_path: Path) -> None:
    folder = data.prepare("enwik8", root=tmp_path / "root", source=source(tmp_path / "a", "a"))
    folder.rename(folder.parent / f".{folder.name}.old")
    restore(folder)
    assert content(tmp_path / "root") == "a"


def test_a_second_preparation_waits_for_the_first_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, root = source(tmp_path / "a", "a"), tmp_path / "root"
    here, there = multiprocessing.Pipe()
    if (first := os.fork()) == 0:
        with store.locked(root / "enwik8"):
            there.send("it prepares")
            there.recv()
        os._exit(0)
    here.recv()

    def release(path: Path) -> str:
        found = holder(path)
        here.send("end")
        return found

    monkeypatch.setattr(store, "holder", release)
    data.prepare("enwik8", root=root, source=raw)
    os.waitpid(first, 0)
    assert f"{root / 'enwik8'}: waiting for process {first} on " in capsys.readouterr().err
    assert content(root) == "a"
