"""A short fine-tuning for merged models, and the loss to compare before and after."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mgk.ops import arguments as check

Batch = dict[str, Any]
OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")  # of Transformers models


class Imitation(nn.Module):
    """A model whose loss is its distance to an original, for data without labels.

    The distance is the KL divergence of the original's distributions, over the last dimension of its logits; of outputs
    that are no logits, or of a single one, it is the squared error relative to the original's squares.

    Args:
        model: what is trained and measured; the original is neither changed nor a submodule.
        original: another model with the same outputs.
    """

    def __init__(self, model: PreTrainedModel, original: PreTrainedModel) -> None:
        super().__init__()
        self.model, self._original = model, [original]

    @property
    def device(self) -> torch.device:
        return self.model.device

    def forward(self, **inputs: Any) -> Any:
        """Run both models, and return an object with the `loss`."""
        with torch.no_grad():
            wanted = self._original[0](**inputs)
        found = self.model(**inputs)
        losses = [distance(found[name], wanted[name], name) for name in OUTPUTS if wanted.get(name) is not None]
        return SimpleNamespace(loss=torch.stack(losses).mean())


def distance(found: Tensor, wanted: Tensor, name: str) -> Tensor:
    """Compute the distance of an output of `Imitation` to the original's."""
    found, wanted = found.float(), wanted.float()
    if name == "last_hidden_state" or wanted.shape[-1] == 1:
        return (found - wanted).square().mean() / wanted.square().mean()
    divergence = nn.functional.kl_div(found.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True)
    return divergence.sum(-1).mean()


def finetune(
    model: PreTrainedModel | Imitation,
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
        model: a Transformers model, or an `Imitation`.
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
def mean_loss(model: PreTrainedModel | Imitation, batches: Iterable[Batch]) -> float:
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


def outputs(model: PreTrainedModel | Imitation, batch: Batch) -> Any:
    """Run a model on one batch.

    Every call has its own autocast context, which caches the weights in bfloat16: a context around several training
    steps would use outdated weights.
    """
    inputs = {name: value.to(model.device) if hasattr(value, "to") else value for name, value in batch.items()}
    with autocast(model):
        return model(**inputs)


def autocast(model: PreTrainedModel | Imitation) -> AbstractContextManager[Any]:
    """Return a bfloat16 autocast context for a model on a GPU, as `mgk train` uses."""
    return torch.autocast("cuda", torch.bfloat16) if model.device.type == "cuda" else nullcontext()
