"""Every batch is processed once, in order: eagerly, right after a capture, or by a replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mgk.recipes import recipe
from mgk.train import replace
from mgk.train.fabric import launch
from mgk.train.graph import Graphs, to_device
from mgk.train.learner import Learner


def test_each_batch_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake of CUDA: capturing computes nothing, a replay uses the captured tensors."""
    done: list[float] = []

    def work(batch: dict[str, Tensor]) -> None:
        done.append(float(batch["x"].sum()))

    def capture(self: Graphs, inputs: dict[str, Tensor]) -> Any:
        inputs = {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
        return SimpleNamespace(replay=lambda: work(inputs)), inputs

    monkeypatch.setattr(Graphs, "capture", capture)
    monkeypatch.setattr(Graphs, "warm_up", lambda self, batch: work(batch))
    graphs = Graphs(work, torch.device("cpu"), pool=object())
    shapes = [2, 3, 2, 2, 3, 5, 2, 3]
    for number, shape in enumerate(shapes, 1):
        graphs({"x": torch.full((shape,), float(number))})
    assert done == [float(number * shape) for number, shape in enumerate(shapes, 1)]
    assert len(graphs.captured) == 2  # a shape that occurs once costs no graph


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize("attention", ["softmax", "smgk", "mgk"])
def test_graphs_and_eager_steps_agree_on_a_gpu(attention: str, compile: str) -> None:
    """Also if the model is compiled; the steps without graphs are not."""
    config = replace(
        recipe("lra-text"),
        model__attention=attention,
        model__max_length=128,
        model__dropout=0.0,
        model__attention_dropout=0.0,
        precision="32-true",
    )
    found = {}
    for graphs in ("on", "off"):
        settings = replace(config, graphs=graphs, compile=compile if graphs == "on" else "off")
        learner = Learner(launch(settings), settings)
        assert isinstance(learner.run, Graphs) == (graphs == "on")
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(1, 257, (4, (64, 128)[step % 2]), generator=generator)
            mask = torch.ones_like(tokens, dtype=torch.bool)
            batch = {"tokens": tokens, "mask": mask, "label": torch.randint(0, 2, (4,), generator=generator)}
            learner.update(step, batch)
        found[graphs] = learner.read()["loss"], learner.evaluate([to_device(batch, torch.device("cpu"))])["loss"]
        assert learner.failed_at() is None
    assert found["on"] == pytest.approx(found["off"], rel=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("attention", ["softmax", "smgk", "linear", "smlk"])
def test_language_models_agree_too(attention: str) -> None:
    """With an adaptive softmax, whose clusters have other sizes in every batch, and one of them at times none."""
    config = replace(
        recipe("wikitext2"), model__attention=attention, model__layers=2, model__width=32, model__hidden=32,
        model__heads=2, model__max_length=64, model__vocabulary=100, model__cutoffs=(20, 50, 90), model__dropout=0.0,
        precision="32-true",
    )  # fmt: skip
    found = {}
    for graphs in ("on", "off"):
        settings = replace(config, graphs=graphs, compile="off")
        learner = Learner(launch(settings), settings)
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, (100, 60)[step % 2], (4, 65), generator=generator)
            batch = {"tokens": tokens[:, :-1], "target": tokens[:, 1:]}
            learner.update(step, batch)
        found[graphs] = learner.read()["loss"], learner.evaluate([to_device(batch, torch.device("cpu"))])["loss"]
        assert learner.failed_at() is None
    assert found["on"] == pytest.approx(found["off"], rel=1e-4)
