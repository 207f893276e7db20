"""Training steps of the Long Range Arena's text model, as `mgk.train` runs them: `python -m benchmarks.train`.

Four models of 2 layers: softmax with 8 heads (SDPA), sMGK and MGK with 4, and MGK with 4 written from the formula in
plain PyTorch, as one would without this package. Each runs from CUDA graphs and eagerly, with the recipe's optimiser,
precision and dropout. Needs only torch, Triton and Fabric.

`milliseconds` is the wall time of a step in the real training loop, with data workers; the host synchronises with the
device once, at the end. `device_milliseconds` is the time of the same graphs replayed back to back, by the device's
clock. Their ratio is the share of the time in which the GPU is busy. The data is random bytes, all inputs of full
length and without a mask; with `--data imdb` it is the prepared set, bucketed by length.

B batch, H heads, M components, N positions, D width of a head, E width of the model.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mgk.data import Batches, Sequences, stream
from mgk.environment import environment
from mgk.files import write_json, write_text
from mgk.models import ClassifierConfig
from mgk.nn import MixtureAttention
from mgk.ops.measure import cuda_milliseconds, seconds
from mgk.recipes import recipe
from mgk.tables import Table
from mgk.train import replace
from mgk.train.config import Config
from mgk.train.data import Source
from mgk.train.fabric import launch
from mgk.train.graph import Graphs
from mgk.train.learner import Learner

METHODS = {"softmax:8": ("softmax", 8), "smgk:4": ("smgk", 4), "mgk:4": ("mgk", 4), "dense mgk:4": ("mgk", 4)}
BASELINE, DENSE = "softmax:8", "dense mgk:4"
WARM = 8  # steps before timing starts


class DenseMixture(nn.Module):
    """MGK from Eqn 9, with the projections and priors of a `MixtureAttention`.

    A[i,j] = sum_r prior_r exp(-|q_i - k_jr|^2 / 2 s2) / sum of the same over j: distances, exponentials, sums, with all
    N x N weights in memory. Only the log-sum-exp is not in the formula: without it half precision gives NaN.
    """

    def __init__(self, fused: MixtureAttention) -> None:
        super().__init__()
        self.fused = fused
        self.variant, self.embed_dim = "dense", fused.embed_dim  # a layer reads these

    def forward(
        self, query: Tensor, key: Any = None, value: Any = None, key_padding_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        m = self.fused
        heads = (m.num_heads, m.head_dim)
        q = m.query_proj(query).unflatten(-1, heads).transpose(1, 2)  # (B,H,N,D)
        v = m.value_proj(query).unflatten(-1, heads).transpose(1, 2)
        components = (m.num_heads, m.num_components, m.head_dim)
        k = m.key_proj(query).unflatten(-1, components).permute(0, 2, 3, 1, 4)  # (B,H,M,N,D)
        products = q[:, :, None] @ k.mT  # (B,H,M,N,N)
        square = q.square().sum(-1)[:, :, None, :, None] + k.square().sum(-1)[:, :, :, None, :]
        assert m.log_prior is not None  # prior="sgd", as in the recipe
        log_prior = m.log_prior[:, :, None, None]
        scores = (log_prior - (square - 2 * products) / (2 * math.sqrt(m.head_dim))).logsumexp(2)  # (B,H,N,N)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        weights = torch.dropout(scores.softmax(-1), m.dropout, self.training)
        return m.out_proj((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2)), None


def make_dense(model: nn.Module) -> None:
    """Replace every fused attention by the formula."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, MixtureAttention):
                setattr(module, name, DenseMixture(child))


class FullLength(Batches):
    """Batches of examples of full length, without their mask: SDPA's flash kernel does not support one."""

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in super().__getitem__(step).items() if name != "mask"}


class Case:
    """Settings and data of one measurement."""

    def __init__(self, device: str, batch: int, length: int, data: str, data_root: str | None, workers: int) -> None:
        base = recipe("lra-text")
        small = device == "cpu"
        self.config = replace(
            base,
            device=device,
            data__batch=batch,
            workers=0 if small else workers,
            model__max_length=length,
            precision="32-true" if small else base.precision,
        )
        self.batches: Batches
        if data == "random":
            # More examples than caches hold, all of full length: the case with the most attention.
            random = np.random.default_rng(0)
            count = 4 * batch
            tokens = random.integers(0, 256, count * length, dtype=np.uint8)
            offsets = np.arange(count + 1) * length
            examples = Sequences(tokens, offsets, shift=1, labels=random.integers(0, 2, count))
            self.batches = FullLength(examples, batch, max_length=length)
        else:
            self.batches = Source(self.config, data_root).batches

    def learner(self, method: str, graphs: bool, accumulate: int = 1) -> Learner:
        """Build the model of a method, with its optimiser."""
        attention, heads = METHODS[method]
        config = replace(
            self.config,
            model__attention=attention,
            model__heads=heads,
            graphs="auto" if graphs else "off",
            accumulate=accumulate,
        )
        return (DenseLearner if method == DENSE else Learner)(launch(config), config)


class DenseLearner(Learner):
    """A learner whose attention is `DenseMixture`."""

    @staticmethod
    def build(config: Config) -> nn.Module:
        model = Learner.build(config)
        make_dense(model)
        return model


def check(dense: Learner, length: int) -> float:
    """Return the relative error of the fused attention against the formula; raise if it is more than rounding."""
    layer = next(module for module in dense.model.modules() if isinstance(module, DenseMixture)).eval()
    x = torch.randn(1, length, layer.embed_dim, generator=torch.Generator().manual_seed(0)).to(dense.device)
    padding = (torch.arange(length) > 0.9 * length)[None].to(dense.device)
    with torch.no_grad(), dense.fabric.autocast():
        wanted = layer(x, key_padding_mask=padding)[0].float()
        found = layer.fused(x, key_padding_mask=padding)[0].float()
    error = float((found - wanted).abs().amax() / wanted.abs().amax())
    limit = 8 * torch.finfo(torch.bfloat16 if dense.device.type == "cuda" else torch.float32).eps
    if not error <= limit:
        raise RuntimeError(f"the fused MGK has a relative error of {error:.1e}; a wrong result is not timed")
    return error


def measure(case: Case, method: str, graphs: bool, steps: int, rounds: int, accumulate: int) -> dict[str, Any]:
    """Return time, memory and the share of time in which the GPU is busy."""
    gc.collect()
    if case.config.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    learner = case.learner(method, graphs, accumulate)
    cuda = learner.device.type == "cuda"
    synchronise: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    shapes: list[torch.Size] = []

    def loop() -> None:
        for step, batch in enumerate(source, WARM):
            shapes.append(batch["tokens"].shape)
            learner.update(step, batch)
        synchronise()

    times = []
    for number in range(rounds + 2):  # the first two see every length twice: once eagerly, once for capture
        source = stream(case.batches, 0, WARM + steps, workers=case.config.workers, pin=cuda)
        for step in range(WARM):  # while the workers start
            learner.update(step, next(source))
        shapes.clear()
        synchronise()
        time = seconds(loop) / steps
        times += [time] if number > 1 else []
    if learner.failed_at() is not None:
        raise RuntimeError(f"{method}: the loss or a gradient is not finite; a wrong result is not timed")
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None  # captures included
    wall, alone = statistics.median(times), replayed(learner, shapes)
    return {
        "method": method,
        "graphs": graphs and cuda,
        "accumulate": accumulate,
        "parameters": learner.parameters,
        "milliseconds": wall * 1e3,
        "milliseconds_each": [time * 1e3 for time in times],
        "device_milliseconds": None if alone is None else alone * 1e3,
        "busy": None if alone is None else alone / wall,
        "peak_mib": peak,
    }


def replayed(learner: Learner, shapes: list[torch.Size]) -> float | None:
    """Return the seconds per step of the graphs alone, over steps of these shapes; None without graphs."""
    if not isinstance(learner.run, Graphs):
        return None
    times = {
        inputs["tokens"].shape: cuda_milliseconds(graph.replay, 1) / 1e3
        for graph, inputs in learner.run.captured.values()
    }
    return statistics.mean(times[shape] for shape in shapes)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown table. Speed is relative to softmax with the same use of graphs."""
    base = {row["graphs"]: row for row in rows if row["method"] == BASELINE and "milliseconds" in row}
    lines = []
    for row in rows:
        line = [row["method"], "yes" if row["graphs"] else "no"]
        if "error" in row:
            lines.append([*line, row["error"], "", "", "", ""])
            continue
        speed = base[row["graphs"]]["milliseconds"] / row["milliseconds"] if row["graphs"] in base else math.nan
        line += [f"{row['milliseconds']:.2f}", f"{speed:.2f}x"]
        optional = {"device_milliseconds": ".2f", "busy": ".0%", "peak_mib": ".0f"}
        lines.append([*line, *("" if row[key] is None else format(row[key], style) for key, style in optional.items())])
    header = ["model", "graphs", "ms/step", "speed", "device ms", "busy", "peak MiB"]
    return Table(header, lines).markdown()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--output", type=Path, help="results/train-DEVICE.json if not given; a Markdown table goes beside it")
    add("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    add("--batch", type=int, default=0, help="examples per step; 32 if not given, 2 on a CPU")
    add("--length", type=int, default=0, help="bytes of an example; 4,000 if not given, 256 on a CPU")
    add("--data", default="random", choices=("random", "imdb"))
    add("--data-root", help="folder of prepared data sets; $MGK_DATA or ~/.cache/mgk/data if not given")
    add("--workers", type=int, default=4, help="processes that load data; none on a CPU")
    add("--steps", type=int, default=0, help="timed steps; 60 if not given, 3 on a CPU")
    add("--rounds", type=int, default=3, help="how many times each method is timed")
    return parser


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options()
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {chosen.rounds}")
    cuda = chosen.device == "cuda"
    batch, length = chosen.batch or (32 if cuda else 2), chosen.length or (4000 if cuda else 256)
    steps = chosen.steps or (60 if cuda else 3)
    case = Case(chosen.device, batch, length, chosen.data, chosen.data_root, chosen.workers)
    assert isinstance(case.config.model, ClassifierConfig)
    path = chosen.output or Path("results") / f"train-{chosen.device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {**environment(), "precision": case.config.precision}
    result: dict[str, Any] = {"environment": facts, "batch": batch, "length": length, "data": chosen.data, "rows": []}
    if DENSE in chosen.methods:
        result["error of the fused MGK"] = check(case.learner(DENSE, False), min(length, 1024))
        print("error of the fused MGK against the formula:", result["error of the fused MGK"], flush=True)
    for method in chosen.methods:
        for graphs in (False, True) if cuda else (False,):
            few = max(2, steps // 10) if method == DENSE else steps
            row: dict[str, Any] = {"method": method, "graphs": graphs, "error": "out of memory"}
            for accumulate in (1, 2, 4, 8):  # a batch that does not fit into memory is split
                if batch % accumulate:
                    break
                try:
                    row = measure(case, method, graphs, few, chosen.rounds, accumulate)
                    break
                except torch.OutOfMemoryError:
                    print(f"{method}: out of memory with the batch in {accumulate} parts", flush=True)
            result["rows"].append(row)
            print(row, flush=True)
            write_json(path, result)  # keep what is measured if something fails later
    print(table(result["rows"]))
    write_text(path.with_suffix(".md"), table(result["rows"]))
    return result


if __name__ == "__main__":
    main()
