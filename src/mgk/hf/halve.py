"""`mgk convert --heads-to-mixtures`: a model read, its heads merged, tuned, measured and written, with a report."""
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# Transformers is typed in part.

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mgk.hf.convert import empty, from_run, is_run, most_positions, save_with_card
from mgk.merge.finetune import finetune, mean_loss
from mgk.merge.merge import merge_heads
from mgk.ops.arguments import check_count
from mgk.train import config as run_config
from mgk.train.config import Config
from mgk.train.data import Source

Batch = dict[str, Any]
MEASURED = 32  # batches of an evaluation
MOST = 1 << 40  # a run's batches are a function of the step: there is always one more


@dataclasses.dataclass(frozen=True)
class Texts:
    """What a model is calibrated, tuned and measured on: functions that make batches anew."""

    calibration: Callable[[], Iterator[Batch]]
    training: Callable[[], Iterable[Batch]]
    valid: Callable[[], Iterator[Batch]]
    test: Callable[[], Iterator[Batch]] | None = None


def halve(
    model_name: str, out: str | Path, *, method: str = "merge", text: Path | None = None, windows: int = 16,
    length: int = 256, finetune_steps: int = 0, lr: float = 3e-4, batch: int = 16, which: str = "best",
    data_root: str | Path | None = None, say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Merge the heads of a model and write the result; see `mgk convert --help`. Returns the report, also written."""
    for name, count in (("windows", windows), ("length", length), ("batch", batch)):
        check_count(f"--{name}", count)
    out, folder = empty(out), Path(model_name)
    settings, tokenizer = None, None
    if is_run(folder):
        settings = run_config.read(folder / "config.json")
        model: Any = from_run(folder, which)
        texts = texts_of_run(settings, data_root, windows, length)
    else:
        on_hub = not folder.is_absolute() and len(folder.parts) <= 2  # OWNER/NAME
        if not on_hub and not folder.is_dir():
            raise ValueError(f"--from: expected a run, a folder or the name of a model on the hub, got {model_name}")
        model, tokenizer = AutoModelForCausalLM.from_pretrained(model_name), AutoTokenizer.from_pretrained(model_name)
        if text is None:
            raise ValueError(f"--text: expected a file to calibrate on, since {model_name} is no run of mgk, got none")
        limit = most_positions(model.config)
        if limit is not None and length > limit:
            raise ValueError(f"--length: expected at most {limit}, the positions of {model_name}, got {length}")
        texts = _of_text(tokenizer, text, windows, length, batch)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    report: dict[str, Any] = {"model": model_name, "loss": {"before": mean_loss(model, texts.valid())}}
    small, merged = merge_heads(model, texts.calibration(), method=method)
    report |= dataclasses.asdict(merged)
    report["loss"]["merged"] = mean_loss(small, texts.valid())
    if finetune_steps:
        finetune(small, texts.training(), steps=finetune_steps, lr=lr)
        report["loss"]["tuned"] = mean_loss(small, texts.valid())
    example = next(texts.valid())
    report["milliseconds"] = [_milliseconds(each, example) for each in (model, small)]
    if settings is not None:
        save_with_card(small, out, settings, data_root)  # type: ignore[arg-type]
    else:
        small.save_pretrained(out)
        tokenizer.save_pretrained(out)  # type: ignore[union-attr]
    (out / "merge.json").write_text(json.dumps(report, indent=1) + "\n")
    for line in lines(report):
        say(line)
    say(f"written to {out}")
    return report


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report, for people."""
    (heads, fewer), (size, smaller), (cache, less) = report["heads"], report["parameters"], report["cache"]
    yield "loss         " + "  ".join(f"{name} {value:.4f}" for name, value in report["loss"].items())
    yield f"heads        {heads} -> {fewer} a layer"
    yield f"parameters   {size:,} -> {smaller:,}"
    yield f"cache        {cache:,} -> {less:,} numbers a token"
    yield "forward      {:.1f} -> {:.1f} ms a batch".format(*report["milliseconds"])
    if report["method"] == "merge":
        yield "similarity   " + " ".join(f"{value:.2f}" for value in report["affinity"]) + " of the pairs, by layer"


def texts_of_run(
    settings: Config, root: str | Path | None, windows: int, length: int, batches: int | None = None
) -> Texts:
    """The run's own data, with the batches of its training; `batches` of the validation set are measured, 0 is all."""
    source = Source(dataclasses.replace(settings, workers=0), root)

    def named(batch: dict[str, Tensor]) -> Batch:
        if settings.kind == "vision":
            return {"pixel_values": batch["pixels"], "labels": batch["label"]}
        if settings.kind == "language":
            return {"input_ids": batch["tokens"], "shift_labels": batch["target"]}
        return {"input_ids": batch["tokens"], "attention_mask": batch["mask"], "labels": batch["label"]}

    def some(count: int) -> Iterator[Batch]:
        for step in range(settings.steps, settings.steps + count):  # what comes after the run's own batches
            yield named(source.batches[step])

    def calibration() -> Iterator[Batch]:
        left = windows
        for given in some(settings.steps):
            part = {name: value[:left] for name, value in given.items() if "labels" not in name}
            part = {n: v if n == "pixel_values" else v[..., :length] for n, v in part.items()}
            left -= len(next(iter(part.values())))
            yield part
            if left <= 0:
                return

    def measured(split: str, count: int) -> Iterator[Batch]:
        for given in source.evaluation(split, count):
            yield named(given)

    valid = partial(measured, settings.data.valid, MEASURED if batches is None else batches)
    test = partial(measured, settings.data.test, 0)
    return Texts(calibration, lambda: some(MOST), valid, test)


def _of_text(tokenizer: Any, path: Path, windows: int, length: int, batch: int) -> Texts:
    """Windows of a file; the last tenth is for measuring."""
    tokens = torch.tensor(tokenizer(path.read_text(encoding="utf-8", errors="replace"))["input_ids"])
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    held = max(1, len(rows) // 10)
    if len(rows) < 2:
        raise ValueError(f"--text: expected at least {2 * length} tokens, got {len(tokens)} in {path}")
    train, rest = rows[:-held], rows[-held:][: MEASURED * batch]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))

    def of(part: Tensor) -> Iterator[Batch]:
        for each in part.split(batch):
            yield {"input_ids": each, "labels": each}

    return Texts(lambda: of(train[order[:windows]]), lambda: list(of(train[order])), lambda: of(rest))


@torch.no_grad()
def _milliseconds(model: Any, batch: Batch, repeats: int = 3) -> float:
    """The best of a few forward passes."""
    given = {name: value.to(model.device) for name, value in batch.items() if "labels" not in name}
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        model(**given)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 1000 * best
