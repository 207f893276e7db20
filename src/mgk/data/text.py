"""Texts as bytes: IMDb reviews (LRA Text) and pairs of ACL Anthology papers (LRA Retrieval).

A byte b is the token b + 1, and 0 is padding. Texts are stored in full; a batch cuts them at its `max_length`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator

import numpy as np

from mgk.data.sources import Source
from mgk.data.splits import Array, Documents, Pairs, Sequences, concatenate
from mgk.data.store import Built, DataError

FACTS = {"vocabulary": 257, "classes": 2, "shift": 1}
REVIEW = r"(train|test)/(pos|neg)/[^/]+\.txt$"

Example = tuple[bytes, int]


def build_imdb(source: Source, *, held_out: int = 2_500, max_length: int | None = None) -> Built:
    """Hold out `held_out` training reviews, always the same ones, as the dev set; LRA itself uses the test set.

    Reads the unpacked archive aclImdb, the archive itself, JSON lines (split, label, text), or the hub. The choice of
    held-out reviews depends on their order: by name in an archive, packed or not, otherwise as they come.
    """
    examples: dict[str, list[Example]] = {"train": [], "test": []}
    for split, content, label in _reviews(source):
        if split in examples:
            examples[split].append((content, label))
    if not all(examples.values()):
        source.missing("reviews of both train and test")
    train, test = (
        Sequences.from_bytes([(content[:max_length], label) for content, label in examples[split]], shift=1)
        for split in ("train", "test")
    )
    kept, dev = hold_out(len(train), held_out)
    return Built({"train": train.select(kept), "dev": train.select(dev), "test": test}, FACTS)


def hold_out(count: int, held_out: int) -> tuple[Array, Array]:
    """Return the indices of the examples to keep and of those to hold out: random, but always the same."""
    if not 0 < held_out < count:
        raise DataError(f"held_out: expected 1 to {count - 1} of the {count} training examples, got {held_out}")
    order = np.random.default_rng(0).permutation(count)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _reviews(source: Source) -> Iterator[tuple[str, bytes, int]]:
    if source.hub:
        for split in ("train", "test"):
            for row in source.hub_rows("stanfordnlp/imdb", split=split):
                yield split, row["text"].encode(), row["label"]
    elif path := (
        source.find("aclImdb", folder=True)
        or source.find("aclImdb_v1.tar", "aclImdb*.tar")
        or source.place("train/pos")
    ):
        for name, content in sorted(source.members(path, REVIEW), key=_numbered):
            split, label = re.search(REVIEW, name).groups()  # type: ignore[union-attr]
            yield split, content, int(label == "pos")
    elif path := source.find("*.jsonl"):
        for row in source.json_lines(path):
            try:
                split, content, label = row["split"], row["text"].encode(), row["label"]
            except (KeyError, TypeError, AttributeError):
                raise DataError(f"{path}: expected the fields split, label and text; {source.advice}") from None
            if label not in (0, 1, "0", "1"):
                raise DataError(f"{path}: label: expected 0 or 1, got {label!r}; {source.advice}")
            yield split, content, int(label)
    else:
        source.missing("aclImdb, aclImdb_v1.tar.gz or *.jsonl")


def _numbered(member: tuple[str, bytes]) -> list[int | str]:
    """Sort key: by name, with numbers in names compared as numbers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", member[0])]


def build_aan(source: Source, *, max_length: int | None = None) -> Built:
    """Read LRA's new_aan_pairs.{train,eval,test}.tsv: label, two ids, two texts, which stay unchanged, as in LRA."""
    files = {"train": "train", "dev": "eval", "test": "test"}
    return Built(
        {split: _pairs(_lra_pairs(source, f"new_aan_pairs.{file}.tsv"), max_length) for split, file in files.items()},
        FACTS,
    )


def _lra_pairs(source: Source, file: str) -> Iterator[tuple[bytes, bytes, int]]:
    path = source.require(file)
    csv.field_size_limit(1 << 30)  # a field is a paper
    with source.text(path) as lines:
        lines_read = csv.reader(lines, delimiter="\t")
        for row in lines_read:
            try:
                label, _, _, first, second = row
                value = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}[label]
            except (ValueError, KeyError):
                raise DataError(
                    f"{path}, line {lines_read.line_num}: expected label, id, id, text, text, separated by "
                    f"tabs, with a label of 0 or 1; {source.advice}"
                ) from None
            yield first.encode(), second.encode(), value


def build_aan_rebuilt(
    source: Source, *, shares: tuple[float, float] = (0.15, 0.25), seed: int = 0, max_length: int | None = None
) -> Built:
    """Build a task like LRA's from papers.jsonl and citations.tsv: does one paper cite the other?

    Papers, not pairs, are divided between the splits (`shares`: of dev and test), so that no paper is in two of them;
    citations between splits are dropped. For each citation there is a pair with label 0: two papers of the split that
    do not cite each other.
    """
    papers = {row["id"]: row["text"].encode() for row in source.json_lines(source.require("papers.jsonl"))}
    with source.text(source.require("citations.tsv")) as lines:
        rows = csv.DictReader(lines, ("citing", "cited"), delimiter="\t")  # a header names no paper, so it cites none
        cited = sorted({(row["citing"], row["cited"]) for row in rows if row["citing"] != row["cited"]})
    random = np.random.default_rng(seed)
    ids = sorted(papers)
    shuffled = [ids[i] for i in random.permutation(len(ids))]
    cuts = [round(share * len(ids)) for share in (shares[0], sum(shares))]
    members = {"dev": shuffled[: cuts[0]], "test": shuffled[cuts[0] : cuts[1]], "train": shuffled[cuts[1] :]}
    linked = set(cited) | {(b, a) for a, b in cited}
    splits = {}
    for split in ("train", "dev", "test"):
        inside = set(members[split])
        positive = [(a, b) for a, b in cited if a in inside and b in inside]
        if not positive:
            raise DataError(
                f"shares: expected at least one citation between papers of {split}, got none; {source.advice}"
            )
        negative = _unlinked_pairs(members[split], linked, len(positive), random)
        pairs = [(a, b, 1) for a, b in positive] + [(a, b, 0) for a, b in negative]
        splits[split] = _pairs(((papers[a], papers[b], label) for a, b, label in pairs), max_length)
    return Built(dict(splits), FACTS)


def build_elife(
    source: Source, *, shares: tuple[float, float] = (0.12, 0.22), seed: int = 0, max_length: int | None = None
) -> Built:
    """Build the same task from articles of eLife. There are more of them, so that smaller shares are enough."""
    return build_aan_rebuilt(source, shares=shares, seed=seed, max_length=max_length)


def _unlinked_pairs(
    ids: list[str], linked: set[tuple[str, str]], count: int, random: np.random.Generator
) -> list[tuple[str, str]]:
    """Draw `count` different pairs of papers that do not cite each other."""
    found: dict[tuple[str, str], None] = {}
    members = set(ids)
    possible = len(ids) * (len(ids) - 1) - sum(a in members and b in members for a, b in linked)
    while len(found) < min(count, possible):
        first, second = (ids[i] for i in random.integers(0, len(ids), 2))
        if first != second and (first, second) not in linked:
            found[first, second] = None
    return list(found)


def _pairs(rows: Iterable[tuple[bytes, bytes, int]], max_length: int | None) -> Pairs:
    number: dict[bytes, int] = {}  # index of each different text
    pairs, labels = [], []
    for first, second, label in rows:
        pairs.append([number.setdefault(content[:max_length], len(number)) for content in (first, second)])
        labels.append(label)
    documents = Documents(*concatenate(number), shift=1)
    return Pairs(documents, np.array(pairs, np.int32).reshape(-1, 2), np.array(labels, np.uint8))
