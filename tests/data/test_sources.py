"""Every set from small files in its published format, and one line that says what to do where they are not right."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import sys
import tarfile
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgk import data
from mgk.data import DataError, Images, Pairs, Sequences, Stream, images

REVIEWS = {(s, y): [f"{s} {y} {i} é".encode() for i in range(3)] for s in ("train", "test") for y in ("neg", "pos")}


@pytest.fixture(autouse=True)
def _no_sources_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MGK_RAW", raising=False)
    monkeypatch.setattr(images, "DEBIAN", Path("/nonexistent"))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / "raw files"
    path.mkdir()
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def prepare(name: str, source: Path | str | None, root: Path, **options: Any) -> data.Prepared:
    data.prepare(name, source=source, root=root, **options)
    return data.load(name, root=root, verify=True, **options)


def texts(split: object) -> dict[bytes, int]:
    assert isinstance(split, Sequences)
    return {(split.row(i) - 1).astype(np.uint8).tobytes(): int(split.labels[i]) for i in range(len(split))}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    content = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(lzma.compress(content.encode()) if path.suffix == ".xz" else content.encode())


# IMDb


def imdb_folder(path: Path) -> None:
    for (split, label), reviews in REVIEWS.items():
        (path / split / label).mkdir(parents=True)
        for number, content in enumerate(reviews):
            (path / split / label / f"{number}_{number + 7}.txt").write_bytes(content)
    (path / "train" / "unsup").mkdir()
    (path / "train" / "unsup" / "0_0.txt").write_bytes(b"nobody rated this")


def check_imdb(prepared: data.Prepared) -> None:
    train, dev, test = (texts(prepared.split(name)) for name in ("train", "dev", "test"))
    expected = {
        s: {r: int(y == "pos") for (t, y), reviews in REVIEWS.items() if t == s for r in reviews}
        for s in ("train", "test")
    }
    assert test == expected["test"]
    assert train | dev == expected["train"]
    assert (len(train), len(dev)) == (4, 2)
    assert texts(prepared.split("train+dev")) == expected["train"]


@pytest.mark.parametrize("where", ["", "aclImdb", "jsonl", "jsonl.xz", "tar.gz"])
def test_imdb(raw: Path, root: Path, where: str) -> None:
    source = raw
    if where.startswith("jsonl"):
        write_jsonl(
            raw / f"reviews.{where}",
            [{"split": s, "label": int(y == "pos"), "text": r.decode()} for (s, y), rs in REVIEWS.items() for r in rs],
        )
    else:
        imdb_folder(raw / "aclImdb")
        source = raw / where
    if where == "tar.gz":
        source = raw / "aclImdb_v1.tar.gz"
        with tarfile.open(source, "w:gz") as archive:
            archive.add(raw / "aclImdb", "aclImdb")
    prepared = prepare("imdb", source, root, held_out=2)
    check_imdb(prepared)
    assert prepared.manifest["origin"]["files"]


def test_the_same_reviews_are_held_out_of_an_archive_and_of_its_folder(raw: Path, root: Path) -> None:
    """In the order of their numbers, as our JSON lines are, whatever the order in the archive."""
    files = {f"{s}/{y}/{i}_7.txt": f"{s} {y} {i}" for s in ("train", "test") for y in ("neg", "pos") for i in range(12)}
    for name, content in files.items():
        (raw / "aclImdb" / name).parent.mkdir(parents=True, exist_ok=True)
        (raw / "aclImdb" / name).write_text(content)
    with tarfile.open(raw / "aclImdb_v1.tar", "w") as archive:
        for name in reversed(files):
            archive.add(raw / "aclImdb" / name, f"aclImdb/{name}")
    rows = [{"split": n.split("/")[0], "label": int("pos" in n), "text": content} for n, content in files.items()]
    write_jsonl(raw / "reviews.jsonl", rows)
    sources = [raw / name for name in ("aclImdb", "aclImdb_v1.tar", "reviews.jsonl")]
    assert len({prepare("imdb", source, root, held_out=9).digest for source in sources}) == 1


def test_imdb_from_the_hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        assert name == "stanfordnlp/imdb"
        return [
            {"text": r.decode(), "label": int(y == "pos")} for (s, y), rs in REVIEWS.items() if s == split for r in rs
        ]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    check_imdb(prepare("imdb", "hub", root, held_out=2))


def test_the_hub_needs_its_library(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"imdb: --source hub needs `datasets`; type: pip install 'mgk\[data\]'"):
        prepare("imdb", "hub", root)


def test_texts_are_cut_where_asked(raw: Path, root: Path) -> None:
    imdb_folder(raw / "aclImdb")
    assert set(texts(prepare("imdb", raw, root, held_out=2, max_length=3).split("test"))) == {b"tes"}


# AAN


def test_aan_as_lra_has_it(raw: Path, root: Path) -> None:
    """Texts with quotes stay as the file has them, and a text that comes twice is stored once."""
    rows = [
        (1.0, "A", "B", "b'first \\n'", "second"),
        (0.0, "B", "C", "second", "b\"say 'x'\""),
        (1.0, "C", "A", 'q"q', "second"),
    ]
    for file in ("train", "eval", "test"):
        lines = ["\t".join(map(str, row)) for row in rows[: 3 if file == "train" else 1]]
        (raw / f"new_aan_pairs.{file}.tsv").write_text("\n".join(lines) + "\n")
    prepared = prepare("aan", raw, root)
    train = prepared.split("train")
    assert isinstance(train, Pairs)
    assert len(train.documents) == 4
    read = [tuple(bytes((train.documents.row(i) - 1).tolist()).decode() for i in pair) for pair in train.pairs]
    assert read == [row[3:] for row in rows]
    assert train.labels.tolist() == [1, 0, 1]
    assert prepared.manifest["splits"] == {"train": 3, "dev": 1, "test": 1}
    part = prepare("aan", raw, root, limit=1).split("train")
    assert isinstance(part, Pairs)
    assert (len(part), len(part.documents)) == (1, 2)


@pytest.mark.parametrize(("task", "header"), [("aan-rebuilt", "citing\tcited\n"), ("elife", "")])
def test_rebuilt_pairs_are_split_by_paper(raw: Path, root: Path, task: str, header: str) -> None:
    """No paper is in two splits; label 1 are citations, label 0 pairs that do not cite each other, as many."""
    random = np.random.default_rng(0)
    papers = [f"P{i}" for i in range(60)]
    citations = sorted({(papers[a], papers[b]) for a, b in random.integers(0, 60, (400, 2)) if a != b})
    write_jsonl(raw / "papers.jsonl.xz", [{"id": paper, "text": f"text of {paper}"} for paper in papers])
    (raw / "citations.tsv").write_text(header + "".join(f"{a}\t{b}\n" for a, b in citations))
    prepared = prepare(task, raw, root)
    seen: dict[str, set[str]] = {}
    for name in prepared.splits:
        split = prepared.split(name)
        assert isinstance(split, Pairs)
        ids = [
            bytes((split.documents.row(i) - 1).tolist()).decode().removeprefix("text of ")
            for i in range(len(split.documents))
        ]
        seen[name] = set(ids)
        for (first, second), label in zip(split.pairs, split.labels, strict=True):
            pair = ids[first], ids[second]
            assert pair[0] != pair[1]
            assert (pair in citations) if label else (pair not in citations and pair[::-1] not in citations)
        assert split.labels.mean() == 0.5
        positive = {(ids[a], ids[b]) for (a, b), label in zip(split.pairs, split.labels, strict=True) if label}
        assert positive == {(a, b) for a, b in citations if a in seen[name] and b in seen[name]}
    assert sum(map(len, seen.values())) == len(set.union(*seen.values()))


# texts


@pytest.mark.parametrize("ending", ["", ".xz", ".gz", ".bz2"])
@pytest.mark.parametrize("name", ["wikitext-103", "wikitext-2"])
def test_wikitext(raw: Path, root: Path, name: str, ending: str) -> None:
    """One <eos> per line, also an empty one; frequent words have small numbers; what training has not seen is <unk>."""
    lines = {"train": " \n = The b b = \n b The <unk> b \n", "valid": " b \n", "test": " new The \n"}
    pack: dict[str, Any] = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress}
    (raw / name).mkdir()
    for split, content in lines.items():
        (raw / name / f"wiki.{split}.tokens{ending}").write_bytes(pack[ending](content.encode()))
    prepared = prepare(name, raw, root)
    assert prepared.words == ["<eos>", "<unk>", "b", "=", "The"]
    assert prepared.manifest["facts"]["vocabulary"] == 5
    streams = {split: prepared.split(split) for split in prepared.splits}
    assert {split: s.tokens.tolist() for split, s in streams.items() if isinstance(s, Stream)} == {
        "train": [0, 3, 4, 2, 2, 3, 0, 2, 4, 1, 2, 0],
        "dev": [2, 0],
        "test": [1, 4, 0],
    }


def test_wikitext_from_the_hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, part: str, split: str) -> list[dict[str, Any]]:
        assert (name, part) == ("Salesforce/wikitext", "wikitext-2-v1")
        return [{"text": ""}, {"text": {"train": " a b \n", "validation": " a \n", "test": " b \n"}[split]}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    prepared = prepare("wikitext-2", "hub", root)
    stream = prepared.split("dev")
    assert isinstance(stream, Stream)
    assert [prepared.words[token] for token in stream.tokens] == ["<eos>", "a", "<eos>"]


def test_articles(raw: Path, root: Path) -> None:
    """Signs stand alone, empty lines are dropped, rare words are <unk>, and the last articles are held out."""
    rows = [
        {"text": "It's a test.\n\nA test, a"},
        {"text": "a test (rare)"},
        {"text": "dev a"},
        {"text": "test\nunseen"},
    ]
    write_jsonl(raw / "articles.jsonl", rows)
    prepared = prepare("enwiki", raw, root, held_out=1, min_count=2)
    assert set(prepared.words) == {"<eos>", "<unk>", "a", "test"}
    read = {}
    for name in prepared.splits:
        stream = prepared.split(name)
        assert isinstance(stream, Stream)
        read[name] = " ".join(prepared.words[token] for token in stream.tokens)
    assert read == {
        "train": "<unk> a test <unk> <eos> <unk> test <unk> a <eos> a test <unk> <unk> <unk> <eos>",
        "dev": "<unk> a <eos>",
        "test": "test <eos> <unk> <eos>",
    }
    assert len(prepare("enwiki", raw, root, held_out=1, max_vocabulary=3).words) == 3


@pytest.mark.parametrize("ending", ["", ".xz", ".zip"])
def test_enwik8(raw: Path, root: Path, ending: str) -> None:
    content = bytes(range(200))
    path = raw / f"enwik8{ending}"
    if ending == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("enwik8", content)
    else:
        path.write_bytes(lzma.compress(content) if ending else content)
    prepared = prepare("enwik8", path, root)
    streams = [prepared.split(name) for name in ("train", "dev", "test")]
    assert [bytes(s.tokens) for s in streams if isinstance(s, Stream)] == [
        content[:180],
        content[180:190],
        content[190:],
    ]
    part = prepare("enwik8", path, root, limit=50).split("train")
    assert isinstance(part, Stream)
    assert bytes(part.tokens) == content[:50]


# text

LINES = "".join(f"Line {number} of a text of one's own, with ü.\n" for number in range(400)).encode()


def test_a_text_of_ones_own_is_split_at_bytes(raw: Path, root: Path) -> None:
    (raw / "mine.md").write_bytes(LINES)
    prepared = prepare("text", raw / "mine.md", root)
    parts = {name: prepared.split(name) for name in ("train", "dev", "test")}
    assert b"".join(bytes(part.tokens) for part in parts.values() if isinstance(part, Stream)) == LINES
    assert len(parts["dev"]) == len(parts["test"]) == len(LINES) // 20


def test_the_files_of_a_folder_are_joined_in_the_order_of_their_names(raw: Path, root: Path) -> None:
    (raw / "b.txt.xz").write_bytes(b"not a text file")
    (raw / "b.txt").write_bytes(LINES)
    (raw / "a.txt").write_bytes(b"first")
    train = prepare("text", raw, root).split("train")
    assert isinstance(train, Stream)
    assert bytes(train.tokens[:9]) == b"first\nLin"


def test_two_texts_have_two_titles_and_a_tokenizer(raw: Path, root: Path) -> None:
    (raw / "a.txt").write_bytes(LINES)
    (raw / "b.txt").write_bytes(LINES.upper())
    first = prepare("text", raw / "a.txt", root, title="a", bpe=300)
    second = prepare("text", raw / "b.txt", root, title="b", bpe=300)
    assert first.path != second.path
    assert first.manifest["facts"]["vocabulary"] == 300
    assert prepare("text", None, root, title="a", bpe=300).digest == first.digest  # prepared already


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (b"short", {}, r"text: expected at least 10,000 bytes of text in .*mine.txt, got 5"),
        (b"\xff\n" * 10_000, {"bpe": 300}, "mine.txt: expected UTF-8 with --bpe, got bytes that are not"),
    ],
)
def test_what_is_no_text_is_told_in_one_line(
    content: bytes, options: dict[str, int], says: str, raw: Path, root: Path
) -> None:
    (raw / "mine.txt").write_bytes(content)
    with pytest.raises(DataError, match=says):
        prepare("text", raw / "mine.txt", root, **options)
    with pytest.raises(DataError, match=r"text: no \*\.txt in .*; name a plain text file"):
        prepare("text", None, root)


# images


def write_idx(path: Path, values: np.ndarray[Any, Any]) -> None:
    head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))


def test_fashion_mnist(raw: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder where Debian's package puts it, without being told."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 28, 28))
    for part, chosen in {"train": slice(0, 10), "t10k": slice(10, 12)}.items():
        write_idx(raw / f"{part}-images-idx3-ubyte.gz", pixels[chosen])
        write_idx(raw / f"{part}-labels-idx1-ubyte.gz", np.arange(12)[chosen] % 10)
    monkeypatch.setattr(images, "DEBIAN", raw)
    prepared = prepare("fashion-mnist", None, root, held_out=3)
    train, dev, test = (prepared.split(name) for name in ("train", "dev", "test"))
    assert isinstance(train, Images)
    assert isinstance(dev, Images)
    assert isinstance(test, Images)
    assert (test.pixels[..., 0] == pixels[10:]).all()
    assert test.labels.tolist() == [0, 1]
    assert sorted([*train.labels, *dev.labels]) == list(range(10))
    assert all(
        (image[..., 0] == pixels[label]).all()
        for s in (train, dev)
        for image, label in zip(s.pixels, s.labels, strict=True)
    )
    np.testing.assert_allclose(train.mean, train.pixels.mean() / 255, rtol=1e-12)
    np.testing.assert_allclose(train.std, train.pixels.std() / 255, rtol=1e-12)


def cifar(raw: Path, kind: str) -> tuple[Path, np.ndarray[Any, Any]]:
    """Twelve images (12,3,32,32), label i, ten of them for training; as Python 2 pickled them or in the binary form."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32)).astype(np.uint8)
    folder = raw / ("cifar-10-batches-bin" if kind == "binary" else "cifar-10-batches-py")
    folder.mkdir()
    for number, chosen in enumerate(np.split(np.arange(12), 6)):
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        if kind == "binary":
            rows = [bytes([i % 10]) + pixels[i].tobytes() for i in chosen]
            (folder / f"{name}.bin").write_bytes(b"".join(rows))
        else:
            batch = {
                b"data": pixels[chosen].reshape(2, -1),
                b"labels": [int(i) % 10 for i in chosen],
                b"batch_label": b"x",
            }
            content = pickle.dumps(batch, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
            (folder / name).write_bytes(content)
    if kind == "archive":
        with tarfile.open(raw / "cifar-10-python.tar.gz", "w:gz") as archive:
            archive.add(folder, folder.name)
        return raw / "cifar-10-python.tar.gz", pixels
    return (folder if kind == "binary" else raw), pixels


@pytest.mark.parametrize("kind", ["python", "binary", "archive"])
def test_cifar10(raw: Path, root: Path, kind: str) -> None:
    source, pixels = cifar(raw, kind)
    prepared = prepare("cifar10", source, root, held_out=3)
    assert prepared.manifest["splits"] == {"train": 7, "dev": 3, "test": 2}
    labels = []
    for name, shift in {"train": 0, "dev": 0, "test": 10}.items():
        split = prepared.split(name)
        assert isinstance(split, Images)
        labels += [int(label) + shift for label in split.labels]
        expected = pixels[split.labels.astype(int) + shift].transpose(0, 2, 3, 1)
        assert (split.pixels == expected).all()
    assert sorted(labels) == list(range(12))


def test_lra_image_is_grey_pixels_in_a_row(raw: Path, root: Path) -> None:
    source, pixels = cifar(raw, "python")
    test = prepare("lra-image", source, root, held_out=3).split("test")
    assert isinstance(test, Sequences)
    for index in range(2):
        red, green, blue = pixels[10 + index].reshape(3, -1).astype(float)
        grey = 0.2989 * red + 0.5870 * green + 0.1140 * blue
        assert np.abs(test.row(index) - 1 - grey).max() <= 1  # whole numbers
        assert test.row(index).shape == (1024,)


@pytest.mark.parametrize("function", ["os system", "numpy fromfile", "builtins eval"])
def test_a_pickle_may_not_call_functions(raw: Path, root: Path, function: str) -> None:
    source, _ = cifar(raw, "python")
    module, name = function.split()
    (source / "cifar-10-batches-py" / "test_batch").write_bytes(f"c{module}\n{name}\n(S'1'\ntR.".encode())
    with pytest.raises(DataError, match=rf"test_batch: expected a batch of CIFAR-10 .it asks for {module}.{name}"):
        prepare("cifar10", source, root)


# where things are, and what is said when they are not


def test_raw_files_are_found_in_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, place in enumerate(["environment", "root/raw", "root/raw/enwik8"]):
        root = tmp_path / str(number)
        folder = root / place
        folder.mkdir(parents=True)
        (folder / "enwik8").write_bytes(bytes(100))
        if place == "environment":
            monkeypatch.setenv("MGK_RAW", str(folder))
        else:
            monkeypatch.delenv("MGK_RAW", raising=False)
        assert len(prepare("enwik8", None, root / "root").split("train")) == 90


def test_sets_side_by_side_are_not_taken_for_each_other(raw: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGK_RAW", str(raw))
    imdb_folder(raw / "aclImdb")
    write_jsonl(raw / "papers.jsonl", [{"id": str(i), "text": "a b"} for i in range(9)])
    check_imdb(prepare("imdb", None, root, held_out=2))
    with pytest.raises(DataError, match=r"enwiki: no articles\.jsonl in"):
        prepare("enwiki", None, root, held_out=1)
    assert prepare("enwiki", raw / "papers.jsonl", root, held_out=1).splits  # named, it is what is wanted
    write_jsonl(raw / "articles.jsonl", [{"text": "c"}] * 9)
    assert prepare("enwiki", raw, root, held_out=1, min_count=1).words[2:] == ["c"]


@pytest.mark.parametrize("name", [name for name in data.names() if name != "listops"])
def test_missing_raw_files_say_where_to_get_them_and_what_to_type(raw: Path, root: Path, name: str) -> None:
    for source in (None, raw):
        with pytest.raises(
            DataError, match=rf"^{name}: no .* in .*; then type: mgk data prepare {name} --source PATH$"
        ) as caught:
            prepare(name, source, root)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"source: .*nowhere does not exist; .*--source PATH$"):
        prepare(name, raw / "nowhere", root)
    assert not data.prepared(root)


def test_listops_reads_lras_files_only_as_they_are(raw: Path, root: Path) -> None:
    with pytest.raises(DataError, match=r"listops: no basic_train.tsv in .*leave out --source to generate it"):
        prepare("listops", raw, root)
    with pytest.raises(DataError, match="source: expected none with sizes"):
        prepare("listops", raw, root, seed=1)
    for name in ("train", "val", "test"):
        (raw / f"basic_{name}.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 7 ) ] )\t7\n")
    train = prepare("listops", raw, root).split("train")
    assert isinstance(train, Sequences)
    assert (train.row(0).tolist(), train.labels.tolist()) == ([12, 3, 8, 15], [7])
    (raw / "basic_val.tsv").write_text("Source\tTarget\n( ( ( [AVG 2 ) 7 ) ] )\t7\n")
    with pytest.raises(DataError, match=r"basic_val.tsv: expected ListOps lines"):
        prepare("listops", raw, root)


@pytest.mark.parametrize("value", ["12", "77", "-1", "300", ""])
def test_listops_values_out_of_range_are_refused_with_their_line(raw: Path, root: Path, value: str) -> None:
    for name in ("train", "val", "test"):
        (raw / f"basic_{name}.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 7 ) ] )\t7\n")
    (raw / "basic_val.tsv").write_text(f"Source\tTarget\n( [MAX 2 7 ] )\t7\n( [MAX 2 7 ] )\t{value}\n")
    with pytest.raises(DataError, match=r"basic_val.tsv(, line 3: expected an|: expected ListOps lines)"):
        prepare("listops", raw, root)


@pytest.mark.parametrize("name", ["listops", "aan", "wikitext-2"])
def test_an_empty_split_is_refused(raw: Path, root: Path, name: str) -> None:
    for split in ("train", "val", "test"):
        (raw / f"basic_{split}.tsv").write_text("Source\tTarget\n" + "[MAX 2 7 ]\t7\n" * (split != "val"))
    for split in ("train", "eval", "test"):
        (raw / f"new_aan_pairs.{split}.tsv").write_text("1.0\tA\tB\ttext\ttext\n" * (split != "eval"))
    for split in ("train", "valid", "test"):
        (raw / f"wiki.{split}.tokens").write_text("some words\n" * (split != "valid"))
    with pytest.raises(DataError, match=f"{name}: no examples of dev in .*; then type: mgk data prepare {name}"):
        prepare(name, raw, root)


def test_labels_of_any_set_are_checked(raw: Path, root: Path) -> None:
    path = cifar(raw, "binary")[0] / "test_batch.bin"
    content = bytearray(path.read_bytes())
    content[0] = 10
    path.write_bytes(content)
    with pytest.raises(DataError, match="cifar10: labels of test: expected 0 to 9, got 1 to 10"):
        prepare("cifar10", raw, root, held_out=2)


DAMAGED: dict[str, tuple[str, str, bytes, str]] = {
    "cut xz": ("enwik8", "enwik8.xz", lzma.compress(bytes(1000))[:40], r"is damaged \("),
    "no gz": ("fashion-mnist", "train-images-idx3-ubyte.gz", b"nothing", r"is damaged \("),
    "no tar": ("imdb", "aclImdb_v1.tar.gz", b"nothing", r"is damaged \("),
    "no gzip": ("enwik8", "enwik8.gz", b"\x1f\x8b" + bytes(50), r"is damaged \("),
    "no zip": ("enwik8", "enwik8.zip", b"nothing", r"is damaged \("),
    "no text": ("wikitext-2", "wiki.train.tokens", b"\xff\xfe", r"is damaged \("),
    "no json": ("imdb", "x.jsonl", b'{"text": \n', "line 1: expected one JSON object"),
    "no field": ("imdb", "x.jsonl", b'{"text": "a"}\n', "expected the fields split, label and text"),
    "no label": (
        "imdb",
        "x.jsonl",
        b'{"split": "train", "text": "a", "label": "neg"}\n',
        "label: expected 0 or 1, got 'neg'",
    ),
    "more labels": (
        "imdb",
        "x.jsonl",
        b'{"split": "test", "text": "a", "label": 4}\n',
        "label: expected 0 or 1, got 4",
    ),
    "no article": ("enwiki", "articles.jsonl", b'{"title": "a"}\n', "expected a field text"),
    "no columns": ("aan", "new_aan_pairs.train.tsv", b"1.0\tA\tB\ttext\n", "expected label, id, id, text, text"),
    "no paper": ("aan-rebuilt", "papers.jsonl", b'{"title": "a"}\n', r"unexpected content .KeyError: 'id'"),
    "deep json": ("enwiki", "articles.jsonl", b"[" * 100_000 + b"\n", "unexpected content|one JSON object"),
    "no idx": ("fashion-mnist", "train-images-idx3-ubyte", bytes(40), "expected an idx file"),
    "too short": ("enwik8", "enwik8", b"abc", "expected at least 20 bytes"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_raw_files_are_named_in_one_line(raw: Path, root: Path, case: str) -> None:
    name, file, content, message = DAMAGED[case]
    (raw / file).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        prepare(name, raw, root)
    assert file in str(caught.value) or case == "too short"
    assert f"type: mgk data prepare {name}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("../../../train/pos/9_9.txt", {}, r"expected names inside the archive, got '\.\./"),
        ("/tmp/train/pos/9_9.txt", {}, "expected names inside the archive, got '/tmp"),
        ("train/pos/9_9.txt", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "expected a file, got a link"),
        (
            "train/pos/9_9.txt",
            {"type": tarfile.LNKTYPE, "linkname": "train/pos/1_1.txt"},
            "expected a file, got a link",
        ),
        ("train/pos/9_9.txt", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}, "or a device"),
        ("train/pos/9_9.txt", {"size": 1 << 40}, "expected at most 1073741824 bytes, got 1099511627776"),
        ("train/pos/9_9.txt", {"size": 1 << 29}, r"is damaged \(unexpected end of data"),
    ],
)
def test_a_hostile_archive_is_refused_in_one_line(
    name: str, changes: dict[str, Any], says: str, raw: Path, root: Path
) -> None:
    path = raw / "aclImdb_v1.tar"
    with tarfile.open(path, "w") as archive:
        for file in ("train/pos/1_1.txt", "train/neg/1_1.txt", "train/neg/2_1.txt", "test/pos/1_1.txt"):
            member = tarfile.TarInfo(file)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"text"))
        hostile = tarfile.TarInfo(name)
        for field, value in changes.items():
            setattr(hostile, field, value)
        archive.addfile(hostile)
    with pytest.raises(DataError, match=rf"aclImdb_v1\.tar.*{says}") as caught:
        prepare("imdb", path, root, held_out=1)
    assert "\n" not in str(caught.value)
    assert sorted(each.name for each in root.parent.iterdir()) == ["raw files", "root"]
    assert sorted(each.name for each in raw.iterdir()) == [path.name]


@pytest.mark.parametrize("how", ["named", "encrypted", "compressed", "empty"])
def test_a_zip_archive_that_cannot_be_read_is_named_in_one_line(how: str, raw: Path, root: Path) -> None:
    path = raw / "enwik8.zip"
    with zipfile.ZipFile(path, "w") as archive:
        if how != "empty":
            archive.writestr("folder/", "")
            archive.writestr("../enwik8" if how == "named" else "enwik8", "a" * 1000)
    content = bytearray(path.read_bytes())
    for local in (True, False):  # each file has two headers
        at = content.rfind(b"PK\3\4" if local else b"PK\1\2") + (6 if local else 8)
        if how == "encrypted":
            content[at] |= 1
        elif how == "compressed":
            content[at + 2] = 99
    path.write_bytes(content)
    says = "expected names inside" if how == "named" else "its first file cannot be read"
    with pytest.raises(DataError, match=rf"enwik8\.zip: {says}") as caught:
        prepare("enwik8", raw, root)
    assert "\n" not in str(caught.value)


def test_too_many_held_out_are_refused(raw: Path, root: Path) -> None:
    imdb_folder(raw / "aclImdb")
    cifar(raw, "python")
    write_jsonl(raw / "articles.jsonl", [{"text": "a"}])
    for name in ("imdb", "cifar10", "lra-image", "enwiki"):
        with pytest.raises(DataError, match="held_out: expected"):
            prepare(name, raw if name != "imdb" else raw / "aclImdb", root, held_out=10)
