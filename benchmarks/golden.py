"""Train five tiny models on a CPU and compare their losses with the recorded ones: `python -m benchmarks.golden`.

One model of each family learns for 50 steps, through the training loop that users run. Where processor, PyTorch and
NumPy are those of the record, every loss must have the recorded bits. Elsewhere sums are rounded in another order, and
each step has a tolerance: four times the largest difference, up to this step, of twin runs whose weights are moved by
eight roundings (a factor of 1 + 2^-20 or 1 - 2^-20, at random) after every step: a sum of 64 numbers, the longest of
these models, has an error of about eight. The tolerances are part of the record.

A change that is meant to alter the numbers records them again with `--write`; it needs a line in the changelog.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import mgk.data
from mgk.files import read_lines, write_json
from mgk.recipes import recipe
from mgk.train import Config, replace, train
from mgk.train.learner import Learner

RECORD = Path(__file__).parent / "golden.json"
STEPS = 50
TWINS = 4
MOVE = 2.0**-20
LISTOPS: dict[str, Any] = {"sizes": (400, 8, 8), "lengths": (4, 30), "depth": 3, "arguments": 4}
SMALL: dict[str, Any] = {
    "model__layers": 2, "model__width": 32, "model__hidden": 32, "model__heads": 2, "model__head_dim": 16,
    "model__max_length": 32, "optimiser__warmup": 5, "optimiser__lr": 3e-3, "steps": STEPS, "eval_every": STEPS,
    "log_every": 1, "data__batch": 8, "workers": 0, "device": "cpu",
    # Other machines draw other random numbers; and `auto` may mean another implementation tomorrow.
    "model__dropout": 0.0, "model__attention_dropout": 0.0, "model__impl": "blockwise",
}  # fmt: skip
CLASSIFIER: dict[str, Any] = {"model__classifier_hidden": 32, "data__pad_multiple": 16}
# name: recipe and its changes
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax classifier": ("lra-listops", {**CLASSIFIER, "model__attention": "softmax"}),
    "MGK language model": ("enwik8", {"model__attention": "mgk", "model__prior": "em", "model__positions": "rotary"}),
    "sMGK classifier": ("lra-listops", {**CLASSIFIER, "model__attention": "smgk", "model__learn_variance": True}),
    "linear classifier": ("lra-listops", {**CLASSIFIER, "model__attention": "linear", "data__pack": 64}),
    "sMLK language model": ("enwik8", {"model__attention": "smlk"}),
}


def machine() -> dict[str, Any]:
    """What decides on the last bits."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "machine": platform.machine(),
        "processor": names[0] if names else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def configuration(name: str) -> Config:
    base, changes = MODELS[name]
    options = LISTOPS if base == "lra-listops" else {}
    text = tuple(f"{key}={list(value) if isinstance(value, tuple) else value}" for key, value in options.items())
    return replace(recipe(base), **(SMALL | changes | {"data__options": text}))


def prepare(root: Path) -> None:
    """Prepare ListOps, and a text of words in a random order, which no file can change."""
    mgk.data.prepare("listops", root=root, **LISTOPS)
    random = np.random.default_rng(0)
    words = ["mixture", "key", "query", "head", "prior", "of", "the", "a", "shift", "value", "and", "attends", "to"]
    (root / "raw").mkdir()
    (root / "raw" / "enwik8").write_text(" ".join(random.choice(words, 4000)))
    mgk.data.prepare("enwik8", source=root / "raw", root=root)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def losses(name: str, root: Path, twin: int = 0, **changes: Any) -> list[float]:
    """Train a model and return the loss of every step; with `twin`, move its weights a little after each."""
    generator, update = torch.Generator().manual_seed(twin), Learner.update

    def update_and_move(self: Learner, step: int, batch: Any) -> None:
        update(self, step, batch)
        with torch.no_grad():
            for parameter in self.model.parameters():
                sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + sign * MOVE)

    with tempfile.TemporaryDirectory() as folder, one_thread():
        with mock.patch.object(Learner, "update", update_and_move if twin else update):
            train(replace(configuration(name), **changes), Path(folder) / "run", data_root=root)
        lines = read_lines(Path(folder) / "run" / "log.jsonl")
    return [line["loss"] for line in lines if line["event"] == "train"]


def record(root: Path) -> dict[str, Any]:
    """Train all models and their twins."""
    curves = {}
    for name in MODELS:
        curve = losses(name, root)
        twins = [losses(name, root, twin) for twin in range(1, TWINS + 1)]
        apart = np.abs(np.array(twins) - np.array(curve)).max(0)
        tolerance = 4 * np.maximum(np.maximum.accumulate(apart), max(curve) * MOVE)
        curves[name] = {"loss": curve, "tolerance": [float(f"{value:.3g}") for value in tolerance]}
    return {**machine(), "curves": curves}


def differences(name: str, found: list[float], recorded: dict[str, Any]) -> list[str]:
    """Return one line for each kind of difference; none if the curve is the recorded one."""
    wanted, tolerance = (recorded["curves"][name][key] for key in ("loss", "tolerance"))
    if len(found) != len(wanted):
        return [f"{name}: expected {len(wanted)} steps, got {len(found)}"]
    exact = machine() == {key: recorded[key] for key in machine()}
    for step, (one, two, near) in enumerate(zip(found, wanted, tolerance, strict=True), 1):
        if not abs(one - two) <= (0 if exact else near):
            allowed = "the same bits" if exact else f"within {near:.2g}"
            return [f"{name}: step {step}: expected {two!r}, {allowed}, got {one!r} ({one - two:+.2g})"]
    return []


def check(recorded: dict[str, Any]) -> list[str]:
    """Train all models and return how they differ from the record."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        return [line for name in MODELS for line in differences(name, losses(name, Path(folder)), recorded)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.golden", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record the curves of the code as it is")
    if parser.parse_args(arguments).write:
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder))
            write_json(RECORD, record(Path(folder)))
        print(f"written to {RECORD}")
        return 0
    recorded = json.loads(RECORD.read_text())
    found = check(recorded)
    print("\n".join(found) or f"{len(MODELS)} models: as recorded")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
