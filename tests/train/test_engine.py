"""The training loop learns, is determined by its configuration, and resumes where it was stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mgk.data
from mgk.models.config import MatcherConfig
from mgk.train import Result, TrainingError, engine, learner, replace, train
from mgk.train.data import Source
from mgk.train.fabric import launch
from mgk.train.learner import Learner, find_non_finite, split
from tests.train.common import LISTOPS, log, losses, prepare, tiny, weights


@pytest.fixture(scope="module")
def undisturbed(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    result = train(tiny(), run, data_root=data_root)
    assert result.finished
    return run


def test_the_folder_has_everything_to_repeat_the_run(undisturbed: Path, data_root: Path) -> None:
    assert {path.name for path in undisturbed.iterdir()} == {
        "config.json", "run.json", "log.jsonl", "result.json", "checkpoints", "last", "best",
    }  # fmt: skip
    (start,) = json.loads((undisturbed / "run.json").read_text())["starts"]
    assert start["data"]["digest"] == mgk.data.load("listops", root=data_root, **LISTOPS).digest
    assert start["seed"] == 0
    assert {"torch", "mgk", "numpy"} <= set(start["versions"])
    assert {"commit", "command", "time", "python"} <= set(start)
    assert not Path(start["command"][0]).is_absolute()


def test_the_log_says_how_it_went(undisturbed: Path) -> None:
    assert [line["step"] for line in log(undisturbed)] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in log(undisturbed, "valid")] == [4, 8, 12]
    assert [line["step"] for line in log(undisturbed, "test")] == [12]
    assert {"loss", "accuracy", "norm", "lr", "seconds_per_step"} <= set(log(undisturbed)[0])
    result = Result(**json.loads((undisturbed / "result.json").read_text()))
    valid = {line["step"]: line["accuracy"] for line in log(undisturbed, "valid")}
    assert valid[result.best_step] == max(valid.values()) == result.valid["accuracy"]
    assert result.test["accuracy"] == log(undisturbed, "test")[0]["accuracy"]


def test_the_same_configuration_gives_the_same_weights_and_another_seed_does_not(
    undisturbed: Path, data_root: Path, tmp_path: Path
) -> None:
    train(tiny(workers=1), tmp_path / "same", data_root=data_root)
    train(tiny(seed=1), tmp_path / "other", data_root=data_root)
    assert weights(tmp_path / "same") == weights(undisturbed)
    assert losses(tmp_path / "same") == losses(undisturbed)
    assert weights(tmp_path / "other") != weights(undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [1, 4, 7])
def test_a_signal_stops_with_a_checkpoint_and_resuming_is_exact(
    number: signal.Signals, step: int, undisturbed: Path, data_root: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    before = signal.getsignal(number)
    update = Learner.update

    def interrupted(self: Learner, at: int, batch: Any) -> None:
        update(self, at, batch)
        if at + 1 == step:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", interrupted)
        stopped = train(tiny(), tmp_path / "run", data_root=data_root)
    assert not stopped.finished
    assert stopped.step == step
    assert signal.getsignal(number) is before
    assert train(tiny(), tmp_path / "run", data_root=data_root, resume=True).finished
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert losses(tmp_path / "run") == losses(undisturbed)
    assert losses(tmp_path / "run", "test") == losses(undisturbed, "test")


def test_priors_by_em_resume_exactly(data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(model__prior="em", model__prior_momentum=0.9)
    train(config, tmp_path / "whole", data_root=data_root)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "Interrupt", lambda: StopAt(5))
        train(config, tmp_path / "parts", data_root=data_root)
    train(config, tmp_path / "parts", data_root=data_root, resume=True)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_an_adapted_model_is_trained_and_resumes_exactly(
    undisturbed: Path, data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def adapt(model: Any) -> None:
        with torch.no_grad():
            model.encoder.tokens.weight.mul_(0.5)

    train(tiny(), tmp_path / "whole", data_root=data_root, adapt=adapt)
    assert losses(tmp_path / "whole")[0] != losses(undisturbed)[0]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "Interrupt", lambda: StopAt(5))
        train(tiny(), tmp_path / "parts", data_root=data_root, adapt=adapt)
    train(tiny(), tmp_path / "parts", data_root=data_root, resume=True, adapt=adapt)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


class StopAt(engine.Interrupt):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def agreed(self, fabric: Any, logs: bool) -> bool:
        self.left -= 1
        return self.left == 0


def test_a_run_resumes_only_with_the_data_it_was_started_with(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(engine, "Interrupt", lambda: StopAt(5))
        train(tiny(), run, data_root=data_root)
    starts = json.loads((run / "run.json").read_text())["starts"]
    digest = starts[0]["data"].pop("digest")
    (run / "run.json").write_text(
        json.dumps({"starts": [starts[0] | {"data": {"name": "listops", "digest": "0" * 64}}]})
    )
    said = f"data: the run in {run} was started with data of digest 000000000000, got {digest[:12]}; resume it"
    with pytest.raises(ValueError, match=said):
        train(tiny(), run, data_root=data_root, resume=True)
    assert len(json.loads((run / "run.json").read_text())["starts"]) == 1
    del starts[0]["data"]  # as in older runs
    (run / "run.json").write_text(json.dumps({"starts": starts}))
    assert train(tiny(), run, data_root=data_root, resume=True).finished


def test_a_finished_run_is_not_run_again(undisturbed: Path, data_root: Path) -> None:
    before = (undisturbed / "log.jsonl").read_bytes()
    assert train(tiny(), undisturbed, data_root=data_root, resume=True).finished
    assert (undisturbed / "log.jsonl").read_bytes() == before


def test_micro_batches_make_the_same_update(data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout, up to rounding: the mean of the means of equal parts is the mean of all."""
    parts: list[int] = []

    def counted(batch: Any, pieces: int) -> Any:
        made = split(batch, pieces)
        parts.append(len(made))
        return made

    monkeypatch.setattr(learner, "split", counted)
    for accumulate in (1, 2, 4):
        config = tiny(accumulate=accumulate, model__dropout=0.0, model__attention_dropout=0.0, optimiser__clip=0.1)
        train(config, tmp_path / str(accumulate), data_root=data_root)
    whole = losses(tmp_path / "1")
    for accumulate in (2, 4):
        # Adam divides by the root of a mean square, so that a gradient near rounding moves a weight as far as any.
        assert losses(tmp_path / str(accumulate)) == pytest.approx(whole, rel=1e-4)
    assert parts == [1] * 12 + [2] * 12 + [4] * 12


def test_packed_batches_make_the_same_update(data_root: Path, tmp_path: Path) -> None:
    """Without dropout, whose shape differs."""
    still = {"model__dropout": 0.0, "model__attention_dropout": 0.0, "data__bucket": False}
    for pack in (0, 16):
        train(tiny(data__pack=pack, **still), tmp_path / str(pack), data_root=data_root)
    assert losses(tmp_path / "16") == pytest.approx(losses(tmp_path / "0"), rel=1e-4)
    with pytest.raises(ValueError, match=r"accumulate: expected 1 with data\.pack"):
        tiny(data__pack=16, accumulate=2)


def test_clipping_bounds_the_update(data_root: Path, tmp_path: Path) -> None:
    train(tiny(optimiser__clip=1e-9, optimiser__eps=1.0), tmp_path / "run", data_root=data_root)
    first, *_, last = losses(tmp_path / "run", "valid")
    assert first == pytest.approx(last, rel=1e-6)  # a gradient of norm 1e-9 over an eps of 1 moves nothing


def test_a_number_that_is_not_finite_stops_with_step_layer_and_advice(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Learner.update

    def poisoned(self: Learner, step: int, batch: Any) -> None:
        if step == 6:
            with torch.no_grad():
                self.model.classifier[2].bias.fill_(1e38)
                self.model.classifier[2].weight.fill_(1e38)
        update(self, step, batch)

    monkeypatch.setattr(Learner, "update", poisoned)
    run = tmp_path / "run"
    with pytest.raises(TrainingError) as error:
        train(tiny(log_every=4), run, data_root=data_root)
    message = str(error.value)
    assert message.startswith("step 6: not finite: layer classifier.2 (Linear); step 4 is kept in")
    assert "Train in another --out with a lower --optimiser.lr (now 0.01)" in message
    assert "--optimiser.clip 1" in message
    assert "\n" not in message
    assert json.loads((run / "last" / "checkpoint.json").read_text())["step"] == 4
    monkeypatch.undo()
    assert train(tiny(), run, data_root=data_root, resume=True).finished  # it resumes from the last good checkpoint


def test_a_gradient_that_is_not_finite_moves_no_weight(data_root: Path, tmp_path: Path) -> None:
    config = tiny()
    learner = Learner(launch(config), config)
    source = Source(config, data_root)
    learner.update(0, source.batches[0])
    before = learner.weights()
    handle = learner.model.classifier[0].weight.register_hook(lambda grad: grad * torch.inf)
    learner.update(1, source.batches[1])
    handle.remove()
    learner.update(2, source.batches[2])  # all later updates are disabled, too
    assert learner.failed_at() == 1
    assert all(torch.equal(value, before[name]) for name, value in learner.weights().items())


@pytest.mark.parametrize("where", ["weight", "layer", "loss", "gradient"])
def test_the_first_non_finite_value_is_found(where: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            hidden = self.first(batch["x"])
            hidden = hidden * 1e38 * 1e38 if where == "layer" else hidden
            out = self.second(hidden).sum()
            return {"loss": out.log() * 0 if where == "loss" else out.abs().sqrt() * 0}

    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        if where == "weight":
            model.first.bias[0] = torch.nan
        if where in ("loss", "gradient"):
            model.second.weight.zero_()
            model.second.bias.zero_()
    expected = {
        "weight": "weight first.bias is not finite",
        "layer": "layer second (Linear)",
        "loss": "the loss, although the outputs of all layers are finite",
        "gradient": "gradient of second.bias",
    }
    assert find_non_finite(model, {"x": torch.ones(1, 2)}) == expected[where]


def test_each_mistake_gives_one_line(data_root: Path, undisturbed: Path, tmp_path: Path) -> None:
    def message(config: Any = None, out: Path = tmp_path / "run", **options: Any) -> str:
        with pytest.raises(ValueError, match=r"\w") as error:
            train(config or tiny(), out, data_root=options.pop("data_root", data_root), **options)
        text = str(error.value)
        assert "\n" not in text
        return text

    assert "continue it with --resume, or choose another --out" in message(out=undisturbed)
    assert "model.heads: the run in" in message(tiny(model__heads=1), undisturbed, resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    assert "found other files" in message(out=tmp_path / "other")
    assert "type: mgk data prepare listops" in message(data_root=tmp_path)
    assert "model.classes: expected at least 10, for listops, got 2" in message(tiny(model__classes=2))
    assert "data.valid: split: expected one of train, dev, test of listops" in message(tiny(data__valid="validation"))
    mgk.data.prepare("listops", root=tmp_path / "small", sizes=(300, 40, 0), lengths=(6, 30))
    small = tiny(data__options=("sizes=[300,40,0]", "lengths=[6,30]"))
    assert "data.test: split: expected at least one example, got 0" in message(small, data_root=tmp_path / "small")
    matcher = MatcherConfig(**dataclasses.asdict(tiny().model))
    assert "data.name: expected a set of pairs for a matcher model, got listops, a set of sequences" in message(
        replace(tiny(), model=matcher)
    )
    assert "data.options: expected NAME=VALUE" in message(tiny(data__options=("sizes",)))
    assert "data.batch: expected a multiple of processes x accumulate = 1 x 3" in message(tiny(accumulate=3))
    assert "strategy: ddp needs several processes" in message(tiny(strategy="ddp"))
    if not torch.cuda.is_available():
        assert "found none" in message(tiny(device="cuda"))
        assert "graphs: on needs one CUDA GPU" in message(tiny(graphs="on"))
    assert not (tmp_path / "run").exists()  # nothing was started


def test_a_damaged_array_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    folder = mgk.data.load("listops", root=prepare(tmp_path / "data"), **LISTOPS).path
    array = next(folder.glob("train.*.npy"))
    array.write_bytes(array.read_bytes()[:-1])
    with pytest.raises(mgk.data.DataError, match="is damaged"):
        train(tiny(), tmp_path / "run", data_root=tmp_path / "data")
    assert not (tmp_path / "run").exists()


def test_tensorboard_events_are_written_if_enabled(data_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tiny(steps=2, tensorboard=True), tmp_path / "run", data_root=data_root)
    assert list((tmp_path / "run").glob("events.*"))


def test_evaluation_batches_are_a_part_of_the_split(data_root: Path) -> None:
    source = Source(tiny(), data_root)
    assert sum(len(batch["label"]) for batch in source.evaluation("dev")) == 40
    assert sum(len(batch["label"]) for batch in source.evaluation("dev", 2)) == 16
