"""The batches that `mgk convert --from` calibrates, tunes and measures on: of a run's data, a text, or images.

B batch, N tokens, C channels of an image.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk.hf.convert import most_positions
from mgk.train.config import Config
from mgk.train.data import Source

Batch = dict[str, Any]
MEASURED = 32  # batches of an evaluation
MASKED = 0.15  # share of the tokens that a masked language model has to restore
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclasses.dataclass(frozen=True)
class Texts:
    """The batches that a model is calibrated, tuned and measured on, as functions that start them afresh."""

    calibration: Callable[[], Iterator[Batch]]
    training: Callable[[], Iterable[Batch]]
    valid: Callable[[], Iterator[Batch]]
    test: Callable[[], Iterator[Batch]] | None = None


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


def texts_of_file(model: Any, tokenizer: Any, path: Path, windows: int, length: int, batch: int) -> Texts:
    """Return windows of a text file, with labels for language models; the last tenth is for measuring."""
    limit, kind = most_positions(model.config), type(model).__name__
    if limit is not None and "Roberta" in kind:  # its positions begin after that of the padding
        limit -= model.config.pad_token_id + 1
    if limit is not None and length > limit:
        raise ValueError(f"--length: expected at most {limit}, the positions of the model, got {length}")
    text = path.read_text(encoding="utf-8", errors="replace")
    causal, masked = kind.endswith(("ForCausalLM", "LMHeadModel")), kind.endswith("ForMaskedLM")
    if causal:
        tokens = torch.tensor(tokenizer(text)["input_ids"])
        rows = tokens[: len(tokens) // length * length].view(-1, length)
        return split({"input_ids": rows, "labels": rows}, windows, batch, "--text", path)
    given = tokenizer(
        text, truncation=True, max_length=length, return_overflowing_tokens=True, return_special_tokens_mask=True
    )
    whole = [i for i, row in enumerate(given["input_ids"]) if len(row) == length]
    rows = torch.tensor([given["input_ids"][i] for i in whole]).view(-1, length)
    columns = {"input_ids": rows}
    if masked:
        special = torch.tensor([given["special_tokens_mask"][i] for i in whole]).view(-1, length)
        columns = hide(rows, special.bool(), tokenizer.mask_token_id)
    return split(columns, windows, batch, "--text", path)


def hide(rows: Tensor, special: Tensor, mask_token: int | None) -> dict[str, Tensor]:
    """Mask tokens (B,N) at random, the same ones in every call, and return the inputs and the labels."""
    if mask_token is None:
        raise ValueError("--from: expected a masked language model whose tokenizer has a mask token, got none")
    drawn = torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)).masked_fill(special, 1)
    hidden = (drawn < MASKED) | (drawn == drawn.min(1, keepdim=True).values)  # at least one in every row
    return {"input_ids": rows.masked_fill(hidden, mask_token), "labels": rows.masked_fill(~hidden, -100)}


def images_of_folder(processor: Any, folder: Path, windows: int, batch: int) -> Texts:
    """Return the images of a folder and its subfolders, as the model's image processor prepares them."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("--images: needs Pillow: pip install pillow") from None
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES)
    images = []
    for path in found:
        with Image.open(path) as image:
            images.append(processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"])
    pixels = torch.cat(images) if images else torch.empty(0, 3, 1, 1)
    return split({"pixel_values": pixels}, windows, batch, "--images", folder)


def split(columns: dict[str, Tensor], windows: int, batch: int, option: str, source: Path) -> Texts:
    """Return rows in random order for calibration and training, and the last tenth of them for measuring."""
    count = len(next(iter(columns.values())))
    if count < 2:
        raise ValueError(f"{option}: expected at least 2 windows of text or images, got {count} in {source}")
    held = max(1, count // 10)
    order = torch.randperm(count - held, generator=torch.Generator().manual_seed(0))
    rest = torch.arange(count - held, count)[: MEASURED * batch]

    def batches(rows: Tensor) -> Iterator[Batch]:
        return ({name: column[each] for name, column in columns.items()} for each in rows.split(batch))

    return Texts(lambda: batches(order[:windows]), lambda: list(batches(order)), lambda: batches(rest))
