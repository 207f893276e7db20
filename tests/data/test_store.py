"""A prepared set is complete or absent; an error is one line that says what to type."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgk import data
from mgk.data import DataError, Sequences, listops, registry, store
from mgk.files import checksum, seal
from tests.data.common import SMALL
from tests.disk import flipped

COMMAND = "mgk data prepare listops --sizes 60 20 20 --lengths 4 40"
FILES = [f"{s}.{a}.npy" for s in ("train", "dev", "test") for a in ("tokens", "offsets", "labels")] + ["manifest.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return data.prepare("listops", root=tmp_path, **SMALL)


def load(folder: Path, **options: Any) -> data.Prepared:
    return data.load("listops", root=folder.parent, **(SMALL | options))


def test_the_manifest_says_what_it_is(folder: Path) -> None:
    prepared = load(folder, verify=True)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert prepared.splits == ("train", "dev", "test")
    assert prepared.manifest["splits"] == {"train": 60, "dev": 20, "test": 20}
    assert prepared.manifest["options"]["sizes"] == [60, 20, 20]
    assert prepared.manifest["facts"]["vocabulary"] == 16
    train = prepared.split("train")
    assert isinstance(train, Sequences)
    assert isinstance(train.tokens, np.memmap)
    examples = listops.generate(100, listops.Shape((4, 40)), seed=0)
    assert [train.row(i).astype(np.uint8).tobytes() for i in range(60)] == [tokens for tokens, _ in examples[:60]]
    assert train.labels.tolist() == [value for _, value in examples[:60]]


def test_prepared_once(folder: Path) -> None:
    written = (folder / "manifest.json").stat().st_mtime_ns
    assert data.prepare("listops", root=folder.parent, **SMALL) == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == written


def test_other_options_are_another_set(folder: Path) -> None:
    other = data.prepare("listops", root=folder.parent, **(SMALL | {"seed": 5}))
    assert other != folder
    assert load(folder).digest != load(folder, seed=5).digest
    assert data.prepare("listops", root=folder.parent, sizes=[60, 20, 20], lengths=[4, 40]) == folder  # as JSON has it
    assert data.prepared(folder.parent) == sorted([folder, other])


def test_limit_keeps_evenly_spread_examples(folder: Path) -> None:
    data.prepare("listops", root=folder.parent, limit=15, **SMALL)
    whole, part = load(folder).split("train"), load(folder, limit=15).split("train")
    assert isinstance(whole, Sequences)
    assert isinstance(part, Sequences)
    assert [part.row(i).tolist() for i in range(15)] == [whole.row(i).tolist() for i in range(0, 60, 4)]
    assert part.labels.tolist() == whole.labels[::4].tolist()


def test_two_splits_can_be_read_as_one(folder: Path) -> None:
    prepared = load(folder)
    both = prepared.split("train+dev")
    parts = [prepared.split(name) for name in ("train", "dev")]
    assert isinstance(both, Sequences)
    rows = [each.row(i).tolist() for each in parts if isinstance(each, Sequences) for i in range(len(each))]
    assert [both.row(i).tolist() for i in range(len(both))] == rows
    assert both.labels.tolist() == [label for each in parts if isinstance(each, Sequences) for label in each.labels]
    with pytest.raises(DataError, match="split: expected one of train, dev, test of listops, got 'valid'"):
        prepared.split("valid")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found_at_once_and_repaired(folder: Path, name: str) -> None:
    digest = load(folder).digest
    os.truncate(folder / name, (folder / name).stat().st_size - 1)
    with pytest.raises(DataError, match=rf"{name} is damaged.*; type: {COMMAND}$"):
        load(folder)
    data.prepare("listops", root=folder.parent, **SMALL)
    assert load(folder, verify=True).digest == digest


@pytest.mark.parametrize("where", ["arrays", "manifest"])
def test_any_flipped_bit_is_noticed_when_the_set_is_opened(folder: Path, where: str) -> None:
    files = [path for path in sorted(folder.iterdir()) if (path.name == "manifest.json") == (where == "manifest")]
    for seed in range(100):
        with flipped(files[seed % len(files)], seed), pytest.raises(DataError, match=rf"; type: {COMMAND}$"):
            load(folder)
    load(folder)


def test_files_that_have_changed_places_are_noticed(folder: Path) -> None:
    one, two, spare = (folder / name for name in ("dev.labels.npy", "test.labels.npy", "spare"))
    load(folder)  # this process has seen both intact
    for source, target in ((one, spare), (two, one), (spare, two)):
        source.rename(target)
    with pytest.raises(DataError, match=rf"labels.npy is damaged: its checksum.*; type: {COMMAND}$"):
        load(folder)
    data.prepare("listops", root=folder.parent, **SMALL)
    load(folder)


def test_a_file_is_read_in_full_once_per_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder)
    read: list[str] = []
    real = checksum

    def counted(path: Path) -> dict[str, Any]:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(store, "checksum", counted)
    load(folder)
    assert read == []
    load(folder, verify=True)
    assert sorted(read) == sorted(set(FILES) - {"manifest.json"})


def forge(folder: Path, **changes: Any) -> None:
    """Change a manifest as someone would who also computes its checksum."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    manifest["sha256"] = seal(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../../elsewhere.npy": {"bytes": 1, "sha256": ""}}},
        {"files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}},
        {"files": {"train.tokens.npy": 3}},
        {"kind": "os.system"},
        {"splits": None},
    ],
)
def test_a_forged_manifest_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    forge(folder, **changes)
    with pytest.raises(DataError, match=r"manifest.json is damaged: .*; type: "):
        load(folder)


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("what", ["pickle", "huge", "shape"])
def test_a_hostile_array_is_refused_with_its_name(
    folder: Path, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksums are right: such a set was made to be opened by others."""
    monkeypatch.chdir(tmp_path)
    path = folder / "train.labels.npy"
    if what == "pickle":
        np.save(path, np.array([Hostile()]), allow_pickle=True)
    elif what == "huge":  # a header that asks for more than there is
        path.write_bytes(path.read_bytes().replace(b"(60,), }  ", b"(6000,), }", 1))
    else:
        np.save(path, np.zeros((3, 20), np.uint8))
    manifest = json.loads((folder / "manifest.json").read_text())
    forge(folder, files=manifest["files"] | {path.name: manifest["files"][path.name] | checksum(path)})
    with pytest.raises(DataError, match=r"train.labels.npy: expected "):
        load(folder).split("train")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"format": 99, "files": {}}', '{"format": 1, "version": 0, "files": {}}']
)
def test_a_manifest_of_something_else_is_refused(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=rf"; type: {COMMAND}$"):
        load(folder)
    data.prepare("listops", root=folder.parent, **SMALL)
    load(folder, verify=True)


def test_a_missing_file_is_found(folder: Path) -> None:
    (folder / "test.labels.npy").unlink()
    with pytest.raises(
        DataError, match=rf"test.labels.npy is damaged: expected \d+ bytes, found missing; type: {COMMAND}$"
    ):
        load(folder)


def test_a_full_disk_leaves_the_existing_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (folder / "test.labels.npy").unlink()  # so that it is prepared again
    with monkeypatch.context() as patch:
        patch.setattr(store, "save_array", full)
        with pytest.raises(
            DataError, match=r"could not be written .No space left on device.; free disk space or set MGK_DATA"
        ):
            data.prepare("listops", root=folder.parent, **SMALL)
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_a_root_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"could not be written .*MGK_DATA"):
        data.prepare("listops", root=tmp_path / "file" / "root", **SMALL)


def test_a_split_may_be_empty(tmp_path: Path) -> None:
    data.prepare("listops", root=tmp_path, sizes=(10, 0, 0), lengths=(4, 40))
    prepared = data.load("listops", root=tmp_path, verify=True, sizes=(10, 0, 0), lengths=(4, 40))
    assert [len(prepared.split(name)) for name in prepared.splits] == [10, 0, 0]


def test_missing_sets_say_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGK_DATA", str(tmp_path))
    assert data.root() == tmp_path
    for name in data.names():
        with pytest.raises(DataError, match=rf"^{name} is not prepared in {tmp_path}; type: mgk data prepare {name}$"):
            data.load(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 3}, "size: expected one of the options of listops, sizes, lengths"),
        ({"sizes": (1, 2)}, r"sizes: expected tuple such as \(96000, 2000, 2000\), got tuple \(1, 2\)"),
        ({"seed": "1"}, "seed: expected int such as 0, got str '1'"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"limit": 0}, "limit: expected at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.prepare("listops", root=tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        data.load("listops", root=tmp_path, **options)


def test_unknown_names_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"name: expected one of listops, imdb, .*, got str 'list-ops'"):
        data.prepare("list-ops", root=tmp_path)


def test_every_set_describes_itself() -> None:
    for name in data.names():
        what = registry.describe(name)
        assert what.summary
        assert what.origin
        assert "limit" in what.options
