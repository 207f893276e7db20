"""A short fine-tuning, and the loss before and after: what a merged model needs."""
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# Transformers is typed in part.

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from mgk.ops import arguments as check

Batch = dict[str, Any]


def finetune(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    steps: int,
    lr: float = 3e-4,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    shown: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train in place with AdamW, a tenth of the steps up to `lr` and then linearly down; returns the losses.

    On a GPU in bfloat16 (autocast), the weights as they are.

    Args:
        model: of Transformers.
        batches: arguments of the model with `labels`, by name; a list is gone through again if it is shorter than
            `steps`.
        steps: updates.
        lr: highest learning rate.
        weight_decay: of AdamW.
        clip: largest norm of the gradient.
        shown: called with the step and its loss.
    """
    check.check_count("steps", steps)
    optimiser = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: min((n + 1) / warm, (steps - n) / steps))
    training, losses = model.training, []
    model.train()
    for step, batch in enumerate(itertools.islice(_again(batches), steps), 1):
        loss = outputs(model, batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
        if shown is not None:
            shown(step, losses[-1])
    model.train(training)
    return losses


@torch.no_grad()
def mean_loss(model: PreTrainedModel, batches: Iterable[Batch]) -> float:
    """Mean of the losses of some batches, in evaluation mode."""
    training = model.training
    model.eval()
    losses = [float(outputs(model, batch).loss) for batch in batches]
    model.train(training)
    if not losses:
        raise ValueError("batches: expected at least one, got none")
    return sum(losses) / len(losses)


def _again(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Over and over, without keeping what an iterator gave."""
    while True:
        found = False
        for batch in batches:
            found = True
            yield batch
        if not found:
            raise ValueError("batches: expected a list, or as many as steps, got fewer")


def outputs(model: PreTrainedModel, batch: Batch) -> Any:
    """Of one batch. Each has a context of its own: one keeps the weights it has narrowed for as long as it lasts."""
    there = {name: value.to(model.device) if hasattr(value, "to") else value for name, value in batch.items()}
    with autocast(model):
        return model(**there)


def autocast(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Products in bfloat16 on a GPU, as `mgk train` has them."""
    return torch.autocast("cuda", torch.bfloat16) if model.device.type == "cuda" else nullcontext()
