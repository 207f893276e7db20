"""What training reports: values that are not finite, spikes of the loss, slow steps, and processes that hang."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mgk.train import TrainingError, checkpoint, train, watch
from mgk.train.data import Source
from mgk.train.fabric import launch
from mgk.train.learner import Learner
from tests.train.common import log, tiny
from tests.train.test_run import stop_at


def test_weights_that_are_not_finite_reach_no_checkpoint(data_root: Path, tmp_path: Path) -> None:
    """With an eps of 0, a weight without gradient becomes 0 / 0."""
    config = tiny(steps=1, eval_every=1, log_every=1, optimiser__eps=0.0, optimiser__warmup=1)
    with pytest.raises(TrainingError, match=r"^step 0: not finite: weights\.\S+ after the update") as error:
        train(config, tmp_path / "run", data_root=data_root)
    assert "Train in another --out with a lower --optimiser.lr" in str(error.value)
    assert "--optimiser.eps above 0" in str(error.value)
    assert checkpoint.find(tmp_path / "run") is None
    (line,) = log(tmp_path / "run", "non-finite")
    assert line["at"] == 0
    assert len(line["examples"]) == config.data.batch


def test_a_stop_between_log_lines_saves_nothing_that_is_not_finite(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Learner.update

    def poisoned(self: Learner, step: int, batch: Any) -> None:
        handle = self.model.classifier[0].weight.register_hook(lambda grad: grad * torch.inf) if step == 5 else None
        update(self, step, batch)
        if handle is not None:
            handle.remove()

    monkeypatch.setattr(Learner, "update", poisoned)
    stop_at(monkeypatch, 7)
    with pytest.raises(TrainingError, match=r"^step 5: not finite"):
        train(tiny(log_every=4), tmp_path / "run", data_root=data_root)
    assert checkpoint.steps(tmp_path / "run") == [4]


def test_processes_draw_different_dropout() -> None:
    config = tiny()
    drawn = []
    for rank in (0, 1):
        learner = Learner(launch(config), config)
        learner.fabric = SimpleNamespace(global_rank=rank)  # type: ignore[assignment]
        learner.seed(3)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] != drawn[1]


def test_a_spike_of_the_loss_is_logged_with_its_examples(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Learner.build

    def build(config: Any) -> Any:
        model: Any = real(config)
        forward, calls = model.loss, [0]

        def spiked(batch: Any) -> Any:
            calls[0] += 1
            found = forward(batch)
            return found | {"loss": found["loss"] * (50 if calls[0] == 6 else 1)}

        model.loss = spiked
        return model

    monkeypatch.setattr(Learner, "build", staticmethod(build))
    train(tiny(eval_every=12, log_every=3), tmp_path / "run", data_root=data_root)
    (line,) = log(tmp_path / "run", "spike")
    assert (line["step"], line["at"]) == (6, 5)
    config = tiny()
    source = Source(config, data_root)
    assert line["examples"] == source.batches.rows(5).tolist()
    assert line["loss"] > 3 * line["before"]


def test_a_step_that_takes_long_is_reported_with_its_stack(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step ends once the report is there."""
    monkeypatch.setattr(watch, "LEAST", 0.05)
    update = Learner.update

    def stuck_in_a_step(self: Learner, step: int, batch: Any) -> None:
        if step == 9:
            while "stuck_in_a_step" not in (stacks.read_text() if stacks.exists() else ""):
                pass
        update(self, step, batch)

    stacks = tmp_path / "run" / "stacks-0.txt"
    monkeypatch.setattr(Learner, "update", stuck_in_a_step)
    train(tiny(eval_every=12), tmp_path / "run", data_root=data_root)
    assert "process 0 (" in stacks.read_text()
    assert "step 9 has taken" in capsys.readouterr().err
    (line,) = [line for line in log(tmp_path / "run", "slow") if line["step"] == 10]
    assert line["seconds"] > 0.05


def hang(run: Path, data_root: Path) -> None:
    Learner.update = lambda self, step, batch: [0 for _ in iter(int, 1)]  # type: ignore[method-assign,assignment,return-value]
    train(tiny(hang_minutes=0.3 / 60), run, data_root=data_root)


def test_a_process_that_hangs_ends_within_its_limit(data_root: Path, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=hang, args=(tmp_path / "run", data_root))
    process.start()
    process.join()
    assert process.exitcode == 1
    assert "Timeout" in (tmp_path / "run" / "stacks-0.txt").read_text()
