"""`mgk convert --heads-to-mixtures`: load a model, merge its heads, fine-tune, measure and write it with a report."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk.files import write_json
from mgk.hf.convert import SUMMED, empty, from_run, is_run, most_positions, save_with_card, writing
from mgk.hf.generate import load_folder
from mgk.merge import finetune, mean_loss, merge_heads
from mgk.merge.sums import write_sums
from mgk.ops.arguments import check_count
from mgk.train import config as run_config
from mgk.train.config import Config
from mgk.train.data import Source, root_of

Batch = dict[str, Any]
MEASURED = 32  # batches of an evaluation


@dataclasses.dataclass(frozen=True)
class Texts:
    """The batches that a model is calibrated, tuned and measured on, as functions that start them afresh."""

    calibration: Callable[[], Iterator[Batch]]
    training: Callable[[], Iterable[Batch]]
    valid: Callable[[], Iterator[Batch]]
    test: Callable[[], Iterator[Batch]] | None = None


def halve(
    model_name: str, out: str | Path, *, method: str = "merge", text: Path | None = None, windows: int = 16,
    length: int = 256, finetune_steps: int = 0, lr: float = 3e-4, batch: int = 16, which: str = "best",
    data_root: str | Path | None = None, say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Merge the heads of a model, and write the result and a report, which is returned; see `mgk convert --help`."""
    for name, count in (("windows", windows), ("length", length), ("batch", batch)):
        check_count(f"--{name}", count)
    out, folder = empty(out), Path(model_name)
    settings, tokenizer = None, None
    if is_run(folder):
        settings, data_root = run_config.read(folder / "config.json"), root_of(folder, data_root)
        model: Any = from_run(folder, which)
        texts = texts_of_run(settings, data_root, windows, length)
    else:
        on_hub = not folder.is_absolute() and len(folder.parts) <= 2  # OWNER/NAME
        if not on_hub and not folder.is_dir():
            raise ValueError(f"--from: expected a run, a folder or the name of a model on the hub, got {model_name}")
        if text is None:
            raise ValueError(f"--text: expected a file to calibrate on, as {model_name} is not a run of mgk, got none")
        model, tokenizer = load_folder(model_name)
        limit = most_positions(model.config)
        if limit is not None and length > limit:
            raise ValueError(f"--length: expected at most {limit}, the positions of {model_name}, got {length}")
        texts = texts_of_file(tokenizer, text, windows, length, batch)
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
    with writing(out) as unfinished:
        if settings is not None:
            save_with_card(small, unfinished, settings, data_root)
        else:
            small.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)  # type: ignore[union-attr]
        write_json(unfinished / "merge.json", report)
        write_sums(unfinished, SUMMED)
    for line in lines(report):
        say(line)
    say(f"written to {out}")
    return report


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report for the terminal."""
    (heads, fewer), (size, smaller), (cache, less) = report["heads"], report["parameters"], report["cache"]
    yield "loss         " + "  ".join(f"{name} {value:.4f}" for name, value in report["loss"].items())
    yield f"heads        {heads} -> {fewer} a layer"
    yield f"parameters   {size:,} -> {smaller:,}"
    yield f"cache        {cache:,} -> {less:,} numbers a token"
    yield "forward      {:.1f} -> {:.1f} ms a batch".format(*report["milliseconds"])
    if report["method"] == "merge":
        yield "similarity   " + " ".join(f"{value:.2f}" for value in report["affinity"]) + " of the pairs, by layer"


def texts_of_run(
    settings: Config, root: str | Path | None, windows: int, length: int, batches: int = MEASURED
) -> Texts:
    """Return the data of a run. `batches` is the number of validation batches; 0 means all."""
    source = Source(dataclasses.replace(settings, workers=0), root)

    def named(batch: dict[str, Tensor]) -> Batch:
        if settings.kind == "vision":
            return {"pixel_values": batch["pixels"], "labels": batch["label"]}
        if settings.kind == "language":
            return {"input_ids": batch["tokens"], "shift_labels": batch["target"]}
        return {"input_ids": batch["tokens"], "attention_mask": batch["mask"], "labels": batch["label"]}

    def training() -> Iterator[Batch]:  # the batches that would follow those of the run; they never end
        return (named(source.batches[step]) for step in itertools.count(settings.steps))

    def calibration() -> Iterator[Batch]:
        left = windows
        for batch in training():
            part = {name: value[:left] for name, value in batch.items() if "labels" not in name}
            part = {name: x if name == "pixel_values" else x[..., :length] for name, x in part.items()}
            left -= len(next(iter(part.values())))
            yield part
            if left <= 0:
                return

    def measured(split: str, count: int) -> Iterator[Batch]:
        return map(named, source.evaluation(split, count))

    valid, test = partial(measured, settings.data.valid, batches), partial(measured, settings.data.test, 0)
    return Texts(calibration, training, valid, test)


def texts_of_file(tokenizer: Any, path: Path, windows: int, length: int, batch: int) -> Texts:
    """Return windows of a text file; the last tenth is for measuring."""
    tokens = torch.tensor(tokenizer(path.read_text(encoding="utf-8", errors="replace"))["input_ids"])
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    held = max(1, len(rows) // 10)
    if len(rows) < 2:
        raise ValueError(f"--text: expected at least {2 * length} tokens, got {len(tokens)} in {path}")
    train, rest = rows[:-held], rows[-held:][: MEASURED * batch]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))

    def batches(part: Tensor) -> Iterator[Batch]:
        return ({"input_ids": each, "labels": each} for each in part.split(batch))

    return Texts(lambda: batches(train[order[:windows]]), lambda: list(batches(train[order])), lambda: batches(rest))


@torch.no_grad()
def _milliseconds(model: Any, batch: Batch) -> float:
    """Return the time of the fastest of three forward passes."""
    inputs = {name: value.to(model.device) for name, value in batch.items() if "labels" not in name}
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model(**inputs)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return min(times)
