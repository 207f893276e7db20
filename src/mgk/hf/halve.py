"""`mgk convert --heads-to-mixtures`: load a model, merge its heads, fine-tune, measure and write it with a report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

from mgk.files import write_json, write_text
from mgk.hf.batches import Batch, Texts, images_of_folder, texts_of_file, texts_of_run
from mgk.hf.convert import SUMMED, empty, from_run, is_run, save_with_card, writing
from mgk.hf.halved_card import halved_card, section
from mgk.merge import Imitation, finetune, mean_loss, merge_heads
from mgk.merge.foreign import auto_name
from mgk.merge.sums import check_sums, write_sums
from mgk.ops.arguments import check_count
from mgk.train import config as run_config
from mgk.train.config import Config

OBJECTIVES = {
    ("ForCausalLM", "LMHeadModel"): "cross-entropy of the next token",
    ("ForMaskedLM",): "cross-entropy of masked tokens",
}
IMITATION = "distance to the outputs of the original model"


@dataclasses.dataclass(frozen=True)
class _Given:
    """A model to convert and its data."""

    model: Any
    texts: Texts
    objective: str
    settings: Config | None = None
    processor: Any = None


def halve(
    model_name: str, out: str | Path, *, method: str = "merge", text: Path | None = None, images: Path | None = None,
    windows: int = 16, length: int = 256, finetune_steps: int = 0, lr: float = 3e-4, batch: int = 16,
    which: str = "best", data_root: str | Path | None = None, say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Merge the heads of a model, and write the result and a report, which is returned; see `mgk convert --help`."""
    for name, count in (("windows", windows), ("length", length), ("batch", batch)):
        check_count(f"--{name}", count)
    out, folder = empty(out), Path(model_name)
    if is_run(folder):
        settings = run_config.read(folder / "config.json")
        texts = texts_of_run(settings, data_root, windows, length)
        given = _Given(from_run(folder, which), texts, "loss of the run", settings)
    else:
        given = _foreign(model_name, text, images, (windows, length, batch))
    model, texts = given.model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), given.texts

    def measured(each: Any) -> Any:
        return Imitation(each, model) if given.objective == IMITATION else each

    report: dict[str, Any] = {"model": model_name, "objective": given.objective}
    report["loss"] = {"before": mean_loss(measured(model), texts.valid())}
    small, merged = merge_heads(model, texts.calibration(), method=method)
    report |= dataclasses.asdict(merged)
    report["loss"]["merged"] = mean_loss(measured(small), texts.valid())
    if finetune_steps:
        finetune(measured(small), texts.training(), steps=finetune_steps, lr=lr)
        report["loss"]["tuned"] = mean_loss(measured(small), texts.valid())
    report["steps"] = finetune_steps
    example = next(texts.valid())
    report["milliseconds"] = [_milliseconds(each, example) for each in (model, small)]
    with writing(out) as unfinished:
        _write(small, given, report, unfinished, data_root)
    for line in lines(report):
        say(line)
    say(f"written to {out}")
    return report


def _foreign(name: str, text: Path | None, images: Path | None, sizes: tuple[int, int, int]) -> _Given:
    """Load a Transformers model by the class that its configuration names, and its data."""
    folder = Path(name)
    on_hub = not folder.is_absolute() and len(folder.parts) <= 2  # OWNER/NAME
    if not on_hub and not folder.is_dir():
        raise ValueError(f"--from: expected a run, a folder or the name of a model on the hub, got {name}")
    check_sums(folder)
    trusted: dict[str, Any] = {"trust_remote_code": False}
    kind = (AutoConfig.from_pretrained(name, **trusted).architectures or [""])[0]
    model = getattr(transformers, auto_name(kind)).from_pretrained(name, **trusted)
    windows, length, batch = sizes
    needed = model.main_input_name
    objective = next((what for ends, what in OBJECTIVES.items() if kind.endswith(ends)), IMITATION)
    if needed == "pixel_values":
        if images is None:
            raise ValueError(f"--images: expected a folder of images to calibrate on, as {name} reads images, got none")
        processor = AutoImageProcessor.from_pretrained(name, **trusted)
        return _Given(model, images_of_folder(processor, images, windows, batch), objective, processor=processor)
    if needed != "input_ids":
        raise ValueError(
            f"--from: expected a model of texts or images, got one of {needed}; call mgk.merge.merge_heads"
        )
    if text is None:
        raise ValueError(f"--text: expected a file to calibrate on, as {name} is not a run of mgk, got none")
    tokenizer = AutoTokenizer.from_pretrained(name, **trusted)
    texts = texts_of_file(model, tokenizer, text, windows, length, batch)
    return _Given(model, texts, objective, processor=tokenizer)


def _write(small: Any, given: _Given, report: dict[str, Any], folder: Path, data_root: str | Path | None) -> None:
    """Write the model with what prepares its inputs, its card and the report."""
    card = folder / "README.md"
    if given.settings is not None:
        save_with_card(small, folder, given.settings, data_root)
        write_text(card, card.read_text() + section(report))
    else:
        small.save_pretrained(folder)
        given.processor.save_pretrained(folder)
        write_text(card, halved_card(report, auto_name(type(given.model).__name__)))
    write_json(folder / "merge.json", report)
    write_sums(folder, SUMMED)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report for the terminal."""
    (heads, fewer), (size, smaller), (cache, less) = report["heads"], report["parameters"], report["cache"]
    yield "loss         " + "  ".join(f"{name} {value:.4f}" for name, value in report["loss"].items())
    yield f"             {report['objective']}"
    yield f"heads        {heads} -> {fewer} a layer"
    yield f"parameters   {size:,} -> {smaller:,}"
    yield f"cache        {cache:,} -> {less:,} numbers a token"
    yield "forward      {:.1f} -> {:.1f} ms a batch".format(*report["milliseconds"])
    if report["method"] == "merge":
        yield "similarity   " + " ".join(f"{value:.2f}" for value in report["affinity"]) + " of the pairs, by layer"


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
