"""What a training shows: its first line and an estimate of the time at once, and samples of a language model's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mgk.files import read_lines
from mgk.train import Config, progress, replace, train
from mgk.train.progress import Progress, duration
from mgk.train.sample import TOP_P, nucleus
from tests.recipes.common import small


def language(root: Path, name: str = "enwik8", **changes: Any) -> Config:
    return replace(
        small(name, root), **({"steps": 4, "eval_every": 2, "log_every": 4, "optimiser__warmup": 2} | changes)
    )


class Clock:
    """A clock that is moved by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_an_estimate_comes_after_the_first_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress("run", 1000)
    for step in (1, 2, 3, 4):  # two seconds each; nothing is logged yet
        clock.now += 2.0
        shown.advance(step)
    assert capsys.readouterr().err == "run: step 2/1,000  33 min left\n"
    clock.now += 10.0
    shown.show(9, loss=2.5)
    shown.show(10, loss=2.5)  # not due
    assert capsys.readouterr().err == "run: step 9/1,000  loss 2.500  33 min left\n"
    shown.show(1000, loss=1.5)
    assert "step 1,000/1,000  loss 1.500  0 s left" in capsys.readouterr().err


def test_a_quiet_display_prints_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress("run", 10, quiet=True)
    clock.now += 60.0
    shown.advance(5)
    shown.show(10, loss=1.0)
    shown.note("sample")
    assert capsys.readouterr().err == ""


def test_a_time_has_the_unit_that_suits_it() -> None:
    assert [duration(seconds) for seconds in (0.4, 89, 600, 12_600)] == ["0 s", "89 s", "10 min", "3.5 h"]


@pytest.mark.parametrize("name", ["enwik8", "wikitext2", "lm-nano-cpu"])
def test_samples_are_shown_and_change_nothing(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = language(tmp_path, name)
    train(settings, tmp_path / "quiet", data_root=tmp_path)
    assert capsys.readouterr().err == ""
    train(settings, tmp_path / "shown", data_root=tmp_path, quiet=False)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("/".join((tmp_path / "shown").parts[-2:]) + f": {settings.recipe}, ")
    assert sum(line.startswith("sample of step") for line in rest) == 2  # at the first evaluation, and at the end
    weights = [(tmp_path / run / "last/model.safetensors").read_bytes() for run in ("quiet", "shown")]
    assert weights[0] == weights[1]
    samples = [line for line in read_lines(tmp_path / "shown/log.jsonl") if line["event"] == "sample"]
    assert [line["step"] for line in samples] == [2, 4]
    assert all(line["text"] for line in samples)


def test_a_sample_is_of_the_most_probable_tokens() -> None:
    logits = torch.tensor([0.0, 9.0, 8.9, -5.0])
    found = nucleus(logits)
    assert found[[0, 3]].tolist() == [0, 0]
    assert found.sum() >= TOP_P
    assert (found > 0).tolist() == [False, True, True, False]
