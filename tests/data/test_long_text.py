"""Preparing a text takes no more memory if the text is longer."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mgk import data
from tests.disk import small_files

WORDS = " ".join(f"word{number}" for number in range(12))


@pytest.mark.parametrize(
    ("name", "options"),
    [("enwik8", {}), ("enwik8", {"bpe": 300}), ("enwiki", {}), ("enwiki", {"bpe": 300}), ("wikitext-2", {})],
)
def test_memory_does_not_grow_with_the_text(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is held as a whole, or its tokens with two bytes for each word of six, would take a third of it."""
    for module in ("splits", "sources", "corpora"):
        monkeypatch.setattr(f"mgk.data.{module}.BLOCK", 1 << 12)
    monkeypatch.setattr("mgk.data.bpe.LINES", 50)
    peaks = []
    for count in (2_000, 2_000, 10_000):  # the first loads libraries
        raw = tmp_path / f"{count}"
        raw.mkdir(exist_ok=True)
        lines = [f"{WORDS}\n"] * count
        (raw / "enwik8").write_text("".join(lines))
        (raw / "articles.jsonl").write_text(f"{json.dumps({'text': ''.join(lines[:10])})}\n" * (count // 10))
        for split in ("train", "valid", "test"):
            (raw / f"wiki.{split}.tokens").write_text("".join(lines))
        del lines
        tracemalloc.start()
        data.prepare(name, source=raw, root=tmp_path / "root", **options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - peaks[1] < 8_000 * len(WORDS) / 6


def test_a_disk_too_small_for_the_text_is_one_line_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_text(f"{WORDS}\n" * 1000)
    root = tmp_path / "root"
    with small_files(10_000), pytest.raises(data.DataError, match=r"root could not be written \(.*free disk space"):
        data.prepare("enwik8", source=tmp_path, root=root)
    assert [path.name for path in root.iterdir()] == [".enwik8.lock"]
