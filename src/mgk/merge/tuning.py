"""A short fine-tuning for merged models, and the loss to compare before and after."""

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
    """Train a model in place with AdamW and return the loss of every step.

    The learning rate rises to `lr` in a tenth of the steps and then falls linearly. On a GPU the forward pass runs in
    bfloat16 (autocast).

    Args:
        model: a Transformers model.
        batches: arguments of the model by name, with `labels`. A list shorter than `steps` is repeated.
        steps: number of updates.
        lr: highest learning rate.
        weight_decay: weight decay of AdamW.
        clip: largest norm of the gradient.
        shown: called with each step and its loss.
    """
    check.check_count("steps", steps)
    optimiser = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: min((n + 1) / warm, (steps - n) / steps))
    training, losses = model.training, []
    model.train()
    for step, batch in enumerate(itertools.islice(_repeated(batches), steps), 1):
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
    """Return the mean of the losses of some batches, computed in evaluation mode."""
    training = model.training
    model.eval()
    losses = [float(outputs(model, batch).loss) for batch in batches]
    model.train(training)
    if not losses:
        raise ValueError("batches: expected at least one, got none")
    return sum(losses) / len(losses)


def _repeated(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Repeat the batches for ever, without storing what an iterator yields (as `itertools.cycle` would)."""
    while True:
        found = False
        for batch in batches:
            found = True
            yield batch
        if not found:
            raise ValueError("batches: expected a list, or as many as steps, got fewer")


def outputs(model: PreTrainedModel, batch: Batch) -> Any:
    """Run a model on one batch.

    Every call has its own autocast context, which caches the weights in bfloat16: a context around several training
    steps would use outdated weights.
    """
    inputs = {name: value.to(model.device) if hasattr(value, "to") else value for name, value in batch.items()}
    with autocast(model):
        return model(**inputs)


def autocast(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Return a bfloat16 autocast context for a model on a GPU, as `mgk train` uses."""
    return torch.autocast("cuda", torch.bfloat16) if model.device.type == "cuda" else nullcontext()
