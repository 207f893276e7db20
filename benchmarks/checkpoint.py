"""The cost of checkpoints, in percent of the time of a training step.

    python -m benchmarks.checkpoint                    350 M parameters on a GPU
    python -m benchmarks.checkpoint --width 64         a small model, also on a CPU

Stretches of steps with one checkpoint at their start take turns with stretches without one. Three ways to write it:
`at once` while training waits, in the `background`, and `sharded` in the background through
torch.distributed.checkpoint, as processes with FSDP do. The last two end in the same folder. The benchmark reads every
checkpoint back and compares it with the weights before it reports a time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mgk.environment import environment
from mgk.files import write_json
from mgk.models import LanguageModelConfig
from mgk.tables import Table
from mgk.train import checkpoint
from mgk.train.config import Config, DataConfig, SaveConfig
from mgk.train.fabric import launch
from mgk.train.graph import Batch
from mgk.train.learner import Learner
from mgk.train.run import Run
from mgk.train.saving import Saver

WAYS = ("at once", "background", "sharded")


def settings(chosen: argparse.Namespace) -> Config:
    model = LanguageModelConfig(
        attention="smgk", layers=chosen.layers, width=chosen.width, heads=max(1, chosen.width // 128), head_dim=64,
        hidden=4 * chosen.width, vocabulary=chosen.vocabulary, cutoffs=(), max_length=chosen.length, norm="pre",
        activation="gelu", dropout=0.0,
    )  # fmt: skip
    data = DataConfig("random", batch=chosen.batch)
    return Config("benchmark", model, data, device=chosen.device, workers=0, save=SaveConfig(newest=1))


class Bench:
    """A model in training, and the folder that its checkpoints go to."""

    def __init__(self, chosen: argparse.Namespace, folder: Path) -> None:
        self.config, self.interval, self.folder = settings(chosen), chosen.interval, folder
        self.fabric = launch(self.config)
        self.learner = Learner(self.fabric, self.config)
        self.run = Run(folder, self.config, resume=False, writes=True)
        random = torch.Generator().manual_seed(0)
        size = (chosen.batch, chosen.length + 1)
        text = torch.randint(chosen.vocabulary, size, generator=random).to(self.fabric.device)
        self.batch: Batch = {"tokens": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}
        self.step = 0
        self.savers = {way: Saver(self.fabric, self.run, self.learner, background=way != WAYS[0]) for way in WAYS}
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.savers["sharded"].group = dist.new_group(backend="gloo")

    def synchronise(self) -> None:
        if self.fabric.device.type == "cuda":
            torch.cuda.synchronize()

    def stretch(self, begin: Callable[[], object]) -> float:
        """Return the seconds of a number of steps, with something at their start."""
        self.synchronise()
        start = time.perf_counter()
        begin()
        for _ in range(self.interval):
            self.learner.update(self.step, self.batch)
            self.step += 1
        self.synchronise()
        return time.perf_counter() - start

    def save(self, way: str) -> None:
        self.savers[way].save(self.step, {"step": self.step}, {}, best=True)

    def check(self, way: str) -> float:
        """Write a checkpoint, read it back and raise an error if it differs; return the seconds until it is on disk."""
        start = time.perf_counter()
        self.save(way)
        self.savers[way].wait()
        seconds = time.perf_counter() - start
        folder = checkpoint.find(self.folder)
        assert folder is not None
        found = checkpoint.load(folder)
        wanted = self.learner.weights()
        same = all(torch.equal(tensor, wanted[name]) for name, tensor in found.weights.items())
        if not same or not found.state["optimiser"]:
            raise RuntimeError(f"{way}: the checkpoint differs from the weights; a wrong result is not timed")
        return seconds


def measure(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    bench.stretch(lambda: None)  # compiles, and captures graphs
    done = {way: bench.check(way) for way in WAYS}
    plain: list[float] = []
    extra: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            before = bench.stretch(lambda: None)
            extra[way].append(bench.stretch(lambda way=way: bench.save(way)) - before)  # type: ignore[misc]
            bench.savers[way].wait()
            plain.append(before)
    step = statistics.median(plain) / bench.interval
    return [
        {
            "way": way,
            "step_milliseconds": step * 1e3,
            "checkpoint_seconds": statistics.median(extra[way]),
            "checkpoint_seconds_each": extra[way],
            "on_disk_after_seconds": done[way],
            "interval": bench.interval,
            "percent": 100 * statistics.median(extra[way]) / (bench.interval * step),
        }
        for way in WAYS
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            row["way"],
            f"{row['step_milliseconds']:.1f}",
            f"{row['checkpoint_seconds']:.2f}",
            f"{row['percent']:.2f}%",
            f"{row['on_disk_after_seconds']:.1f}",
        ]
        for row in rows
    ]
    head = ["checkpoint", "ms/step", "training waits, s", f"of {rows[0]['interval']} steps", "on disk after, s"]
    return Table(head, lines).markdown()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        "python -m benchmarks.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    add("--layers", type=int, default=24)
    add("--width", type=int, default=1024)
    add("--vocabulary", type=int, default=50_304)
    add("--length", type=int, default=1024)
    add("--batch", type=int, default=16)
    add("--interval", type=int, default=100, help="steps from one checkpoint to the next")
    add("--rounds", type=int, default=3)
    add("--folder", type=Path, help="where to write; a temporary folder if not given")
    add("--output", type=Path, default=Path("results") / "checkpoint.json")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        bench = Bench(chosen, Path(folder))
        rows = measure(bench, chosen.rounds)
        for saver in bench.savers.values():
            saver.__exit__()
    dist.destroy_process_group()
    facts = {**environment(), "parameters": bench.learner.parameters, "cores": os.cpu_count()}
    result = {"environment": facts, "configuration": vars(chosen) | {"output": "", "folder": ""}, "rows": rows}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(chosen.output, result)
    print(f"{bench.learner.parameters / 1e6:.0f} M parameters\n{table(rows)}")
    return result


if __name__ == "__main__":
    main()
