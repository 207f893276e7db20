"""Batches are pure functions of the step, and nothing is lost or read twice."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mgk import data
from mgk.data import Batch, Batches, Evaluation, Sequences, stream
from mgk.data import batches as batches_module
from mgk.data.splits import AnySplit
from tests.data.common import SMALL, images, pairs, sequences, text

LENGTHS = np.random.default_rng(0).integers(1, 200, 333).tolist()
SPLITS: dict[str, AnySplit] = {
    "sequences": sequences(LENGTHS),
    "pairs": pairs(LENGTHS),
    "images": images(50),
    "text": text(1000),
}
OPTIONS: dict[str, Any] = {"batch_size": 6, "seed": 3, "max_length": 150}


def same(first: Batch, second: Batch) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@given(
    count=st.integers(1, 70),
    batch_size=st.integers(1, 20),
    seed=st.integers(0, 99),
    bucket=st.booleans(),
    epochs=st.integers(1, 4),
)
def test_each_epoch_has_every_example_once(count: int, batch_size: int, seed: int, bucket: bool, epochs: int) -> None:
    """Also if the batch size does not divide the epoch, or exceeds it."""
    batches = Batches(sequences([1 + i % 7 for i in range(count)]), batch_size, seed=seed, bucket=bucket)
    steps = -(-count * epochs // batch_size)
    rows = np.concatenate([batches.rows(step) for step in range(steps)])[: count * epochs]
    assert (np.sort(rows.reshape(epochs, count), axis=1) == np.arange(count)).all()


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("bucket", [True, False])
def test_a_step_does_not_depend_on_earlier_accesses(kind: str, bucket: bool) -> None:
    used = Batches(SPLITS[kind], bucket=bucket, **OPTIONS)
    steps = [0, 1, 200, 57, 2, 500, 55, 56]
    seen = [used[step] for step in steps]
    assert all(same(Batches(SPLITS[kind], bucket=bucket, **OPTIONS)[k], seen[i]) for i, k in enumerate(steps))


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("world", [2, 3])
def test_the_rows_of_all_processes_are_the_batch_of_one_process(kind: str, world: int) -> None:
    ranks = [Batches(SPLITS[kind], rank=rank, world=world, **OPTIONS) for rank in range(world)]
    for step in (0, 7, 55, 56):
        parts = [each[step] for each in ranks]
        whole = Batches(SPLITS[kind], **OPTIONS)[step]
        assert same({key: torch.cat([part[key] for part in parts]) for key in whole}, whole)


def test_seed_and_epoch_change_the_order() -> None:
    split = SPLITS["sequences"]
    first, other = Batches(split, 37, seed=0), Batches(split, 37, seed=1)
    assert (first.rows(0) != other.rows(0)).any()
    assert (first.rows(0) != first.rows(9)).any()  # 9 steps are an epoch


def test_buckets_leave_little_padding_and_random_batches() -> None:
    """Lengths 1 to 199: a random batch of 4 is about two fifths padding, and one of similar lengths 1 or 2 percent."""
    share = {}
    for bucket in (True, False):
        batches = Batches(SPLITS["sequences"], 4, bucket=bucket)
        masks = [batches[step]["mask"] for step in range(83 * 2, 83 * 4)]  # epochs that start within a batch
        share[bucket] = 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
    assert share[True] < 0.05 < 0.3 < share[False]
    longest = [Batches(SPLITS["sequences"], 4)[step]["mask"].shape[1] for step in range(40)]  # of the first 50
    assert sorted(longest) != longest


@pytest.mark.parametrize(
    ("pad_multiple", "max_length", "expected"), [(1, None, 7), (4, None, 8), (5, 9, 9), (64, 64, 64), (1, 6, 6)]
)
def test_rows_are_padded_to_a_multiple_and_cut(pad_multiple: int, max_length: int | None, expected: int) -> None:
    split = replace(sequences([7, 3]), shift=5)
    batch = Batches(split, 2, pad_multiple=pad_multiple, max_length=max_length)[0]
    assert batch["tokens"].shape == batch["mask"].shape == (2, expected)
    for tokens, mask, label in zip(batch["tokens"], batch["mask"], batch["label"], strict=True):
        length = min([7, 3][int(label)], expected)
        assert mask.tolist() == [True] * length + [False] * (expected - length)
        assert tokens.tolist() == [int(label) + 1 + 5] * length + [0] * (expected - length)


@pytest.mark.parametrize("kind", ["sequences", "pairs"])
@pytest.mark.parametrize("pack", [1, 64, 10_000])
def test_packed_batches_hold_the_same_tokens_without_padding(kind: str, pack: int) -> None:
    padded, packed = (Batches(SPLITS[kind], pack=size, **OPTIONS) for size in (0, pack))
    for step in (0, 55, 56):
        whole, part = padded[step], packed[step]
        assert torch.equal(part["mask"], whole["mask"])
        assert torch.equal(part["label"], whole["label"])
        real = whole["tokens"][whole["mask"]]
        assert torch.equal(part["tokens"][: len(real)], real)
        assert not part["tokens"][len(real) :].any()
        assert len(part["tokens"]) == min(-(-len(real) // pack) * pack, whole["mask"].numel())


def test_pairs_hold_both_documents() -> None:
    batch = Batches(pairs([2, 5]), 2)[0]
    assert batch["tokens"].shape == (2, 2, 5)
    for tokens, mask, label in zip(batch["tokens"], batch["mask"], batch["label"].tolist(), strict=True):
        assert [row[seen].tolist() for row, seen in zip(tokens, mask, strict=True)] == [
            [label + 1] * [2, 5, 3][label],
            [label + 2] * [2, 5, 3][label + 1],
        ]


def test_images_are_normalised_and_have_channels_first() -> None:
    split = images(5)
    batch = Batches(split, 5)[0]
    assert batch["pixels"].dtype == torch.float32
    for pixels, label in zip(batch["pixels"], batch["label"].tolist(), strict=True):
        expected = (split.pixels[label] / 255 - [0.5, 0.25]) / [0.5, 0.125]
        np.testing.assert_allclose(pixels.permute(1, 2, 0), expected, rtol=1e-6, atol=1e-6)


def test_text_is_read_in_tracks() -> None:
    """Row b of successive steps is track b without a gap, the target is the next token, and epochs are equal."""
    batches = Batches(text(1000), 4, max_length=16)
    assert batches.steps_per_epoch == 15  # (1000 - 1) // 4 = 249 tokens are 15 windows
    rows = torch.cat([batches[step]["tokens"] for step in range(15)], 1)
    assert torch.equal(rows, torch.arange(4)[:, None] * 249 + torch.arange(15 * 16))
    assert torch.equal(torch.cat([batches[step]["target"] for step in range(15)], 1), rows + 1)
    assert same(batches[16], batches[1])


@given(count=st.integers(1, 60), batch_size=st.integers(4, 9), world=st.integers(1, 4), data_=st.data())
def test_evaluation_sees_every_example_once(count: int, batch_size: int, world: int, data_: st.DataObject) -> None:
    """Over all processes, with equal numbers of batches, none of them empty, in order of length."""
    lengths = data_.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    if count < world:
        with pytest.raises(ValueError, match="world: expected at most"):
            Evaluation(sequences(lengths), batch_size, world=world)
        return
    ranks = [Evaluation(sequences(lengths), batch_size, rank=rank, world=world) for rank in range(world)]
    batches = [list(stream(each)) for each in ranks]
    assert len({len(each) for each in batches}) == 1
    assert min(len(batch["label"]) for each in batches for batch in each) >= 1
    labels = [label for step in zip(*batches, strict=True) for batch in step for label in batch["label"].tolist()]
    assert sorted(labels) == list(range(count))
    assert [lengths[label] for label in labels] == sorted(lengths)


def test_evaluation_of_a_part_is_spread_evenly() -> None:
    labels = torch.cat([batch["label"] for batch in stream(data.evaluation(images(50), 4, limit=10))])
    assert labels.tolist() == list(range(0, 50, 5))


def test_evaluation_of_text_has_every_window_once() -> None:
    batches = list(stream(data.evaluation(text(100), 4, max_length=10)))
    assert torch.equal(torch.cat([batch["target"] for batch in batches]).flatten(), torch.arange(1, 91))


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_keep_order_and_leave_the_global_generator_alone(workers: int) -> None:
    batches = Batches(SPLITS["sequences"], **OPTIONS)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    seen = list(stream(batches, 50, 60, workers=workers))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(same(batch, batches[step]) for step, batch in zip(range(50, 60), seen, strict=True))


KEPT: list[Iterator[Batch]] = []


def leave_a_stream_behind() -> None:
    KEPT.append(stream(Batches(SPLITS["sequences"], **OPTIONS), 0, 100, workers=1))
    next(KEPT[0])


def test_workers_end_with_their_parent() -> None:
    """A parent that ends stops its workers, whatever signals they ignore, and waits for them."""
    process = multiprocessing.get_context("fork").Process(target=leave_a_stream_behind)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0


def begin_late(there: Any) -> None:
    """Start a worker whose parent is dead when it begins."""
    begin, parent = batches_module._obey_parent_only, os.getpid()

    def late(worker: int) -> None:
        there.send(os.getpid())
        while os.getppid() == parent:
            pass
        begin(worker)

    batches_module._obey_parent_only = late
    KEPT.append(stream(Batches(SPLITS["sequences"], **OPTIONS), 0, 100, workers=1))
    signal.pause()


def test_a_worker_ends_even_if_its_parent_was_killed_before_it_began() -> None:
    """A pipe ends when the last process that could write to it does."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=begin_late, args=(there,))
    process.start()
    there.close()
    worker = here.recv()
    process.kill()
    ended = here.poll(30)
    if not ended:
        os.kill(worker, signal.SIGKILL)
    assert ended
    with pytest.raises(EOFError):
        here.recv()


def test_a_mapped_split_is_pickled_as_its_path(tmp_path: Path) -> None:
    """A worker that is not forked receives a few bytes, and maps the same file."""
    data.prepare("listops", root=tmp_path, **SMALL)
    split = data.load("listops", root=tmp_path, **SMALL).split("train")
    assert isinstance(split, Sequences)
    assert len(pickle.dumps(split)) < 1000 < split.tokens.nbytes + split.offsets.nbytes
    copy = pickle.loads(pickle.dumps(split))
    assert isinstance(copy.tokens, np.memmap)
    assert same(Batches(copy, 8)[5], Batches(split, 8)[5])
    part = Sequences(split.tokens[: split.offsets[3]], split.offsets[:4], labels=split.labels[:3])
    assert same(Batches(pickle.loads(pickle.dumps(part)), 3)[0], Batches(part, 3)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"batch_size": 3, "world": 2}, "batch_size: expected a multiple of world = 2, got 3"),
        ({"rank": 1}, "rank: expected 0 to 0 for world = 1"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"max_length": 0}, "max_length: expected at least 1, got 0"),
        ({"pad_multiple": 0}, "pad_multiple: expected at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(SPLITS["sequences"], **({"batch_size": 2} | options))


def test_wrong_use_is_named() -> None:
    with pytest.raises(ValueError, match="pack: expected 0 for images, which have no padding, got 8"):
        Batches(images(3), 1, pack=8)
    with pytest.raises(ValueError, match="max_length: expected the number of tokens of a window"):
        Batches(text(100), 2)
    with pytest.raises(ValueError, match="batch_size: expected at most the 9 windows of 11 tokens"):
        Batches(text(100), 10, max_length=11)
    with pytest.raises(ValueError, match="step: expected at least 0, got -1"):
        Batches(text(100), 1, max_length=11)[-1]
    with pytest.raises(ValueError, match="stop: expected a step"):
        stream(Batches(images(2), 2))
    for of in (Batches, Evaluation):
        with pytest.raises(ValueError, match="split: expected at least one example"):
            of(sequences([]), 2)
    with pytest.raises(ValueError, match="split: expected more than a window of 11 tokens, got 11"):
        Evaluation(text(11), 2, max_length=11)


def test_batches_are_what_models_expect() -> None:
    kinds: dict[str, dict[str, Tensor]] = {name: Batches(split, **OPTIONS)[0] for name, split in SPLITS.items()}
    assert {name: {key: value.dtype for key, value in batch.items()} for name, batch in kinds.items()} == {
        "sequences": {"tokens": torch.int64, "mask": torch.bool, "label": torch.int64},
        "pairs": {"tokens": torch.int64, "mask": torch.bool, "label": torch.int64},
        "images": {"pixels": torch.float32, "label": torch.int64},
        "text": {"tokens": torch.int64, "target": torch.int64},
    }
