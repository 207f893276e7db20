"""The model, its optimiser and one step of training, arranged so that the host never waits for the device.

Losses are added up on the device and read when a line is logged. A gradient that is not finite sets a flag there which
stops all further updates, so that the weights that led to it are still there when the host looks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mgk.models import build
from mgk.train.config import Config
from mgk.train.graph import Batch, Eager, Graphs
from mgk.train.schedule import learning_rate

if TYPE_CHECKING:
    from lightning_fabric import Fabric

SUMS = ("loss", "correct", "count", "norm", "steps")


class Objective(nn.Module):
    """The model as Fabric and torch.compile see it: a batch goes in, losses come out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.model.loss(batch)  # type: ignore[operator, no-any-return]


class Learner:
    """Everything of a run that lives on the device."""

    def __init__(self, fabric: Fabric, config: Config) -> None:
        self.fabric, self.config, self.device = fabric, config, fabric.device
        torch.manual_seed(config.seed)  # the same initial weights whatever the number of processes
        self.objective = Objective(self.build(config))
        self.sharded = config.strategy == "fsdp"
        call = torch.compile(self.objective) if config.compile else self.objective
        self.call = fabric.setup_module(call)  # type: ignore[arg-type]
        self.optimiser: Any = fabric.setup_optimizers(self._optimiser())
        self.sums = self._zeros(SUMS)
        self.scores = self._zeros(SUMS[:3])
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=self.device)
        self.now = torch.zeros((), dtype=torch.int64, device=self.device)
        # Graphs need one device, shapes that the batch alone decides, and a loss that is not read on the way.
        possible = self.device.type == "cuda" and fabric.world_size == 1
        possible = possible and self.model.capturable and not config.model.recompute
        if config.graphs == "on" and not possible:
            raise ValueError(
                "graphs: on needs one CUDA GPU, Triton for an adaptive softmax or causal linear attention, and no "
                "recomputation"
            )
        if possible and config.graphs != "off" and not config.compile:
            train = Graphs(self._update, self.device)
            self.run: Callable[[Batch], None] = train
            self._score: Callable[[Batch], None] = Graphs(self._measure, self.device, train.pool)
        else:
            self.run, self._score = Eager(self._update, self.device), Eager(self._measure, self.device)

    @staticmethod
    def build(config: Config) -> nn.Module:
        return build(config.model)

    @property
    def model(self) -> Any:
        return self.objective.model

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.objective.parameters())

    def update(self, step: int, batch: Batch) -> None:
        """Update number `step`: a function of the weights, the batch and the step, and of nothing else."""
        self.seed(step)
        self._set_rate(learning_rate(self.config.optimiser, step, self.config.steps))
        self.now.fill_(step)
        self.objective.train()
        self.run(batch)

    def seed(self, step: int) -> None:
        """Dropout is drawn from (seed, step, process): there is no state of a generator to save."""
        text = f"{self.config.seed} {step} {self.fabric.global_rank}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little"))

    def read(self) -> dict[str, float]:
        """The means since the last call, over all processes: this waits for the device."""
        sums: Any = torch.stack([self.sums[name] for name in SUMS])
        sums = self.fabric.all_reduce(sums, reduce_op="sum") if self.fabric.world_size > 1 else sums
        loss, correct, count, norm, steps = sums.tolist()
        for total in self.sums.values():
            total.zero_()
        steps = max(steps, 1)
        result = {"loss": loss / steps, "norm": norm / steps}
        return result | ({"accuracy": correct / count} if self.classifies and count else {})

    @property
    def classifies(self) -> bool:
        return self.config.kind != "language"

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Mean loss over a split, and accuracy or perplexity; the device is waited for once."""
        self.objective.eval()
        for batch in batches:
            self._score(batch)
        sums: Any = torch.stack([self.scores[name] for name in SUMS[:3]])
        if self.fabric.world_size > 1:
            sums = self.fabric.all_reduce(sums, reduce_op="sum")
        loss, correct, count = sums.tolist()
        for total in self.scores.values():
            total.zero_()
        mean = loss / max(count, 1)
        return scores(mean, correct / max(count, 1) if self.classifies else None)

    def failed_at(self) -> int | None:
        """The first step whose gradient was not finite, None if there is none: this waits for the device."""
        step = int(self.bad_step)
        return None if step < 0 else step

    def state(self) -> dict[str, Any]:
        """What beside the weights and the step decides how a run goes on. Collective where weights are sharded."""
        moments = {
            name: {key: whole(value) for key, value in self.optimiser.optimizer.state[parameter].items()}
            for name, parameter in self.model.named_parameters()
        }
        return {"optimiser": moments, "sums": {name: value.cpu().clone() for name, value in self.sums.items()}}

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(value) for name, value in self.model.state_dict().items()}

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], state: dict[str, Any] | None = None) -> None:
        """Weights, and where training goes on the state, of `weights` and `state`."""
        load_weights(self.model, weights)
        if state is None:
            return
        for name, parameter in self.model.named_parameters():
            self.optimiser.optimizer.state[parameter] = {
                key: placed(value, parameter) if value.dim() else value.to(self._steps_device)
                for key, value in state["optimiser"][name].items()
            }
        for name, value in state["sums"].items():
            self.sums[name].copy_(value)

    def _update(self, batch: Batch) -> None:
        """Forward, backward and update on the device; captured in a CUDA graph, so nothing here may look at a value."""
        self.optimiser.zero_grad(set_to_none=True)
        pieces = split(batch, self.config.accumulate)
        for number, piece in enumerate(pieces):
            waits = self.fabric.world_size > 1 and not self.sharded and number < len(pieces) - 1
            with self.fabric.no_backward_sync(self.call, enabled=waits):
                losses = self.call(piece)
                self.fabric.backward(losses["loss"] / len(pieces))
            add(self.sums, losses, losses["loss"] / len(pieces))
        gradients = [p.grad for p in self.objective.parameters() if p.grad is not None]
        norm = get_total_norm(gradients, foreach=True)
        if self.config.optimiser.clip:
            clip_grads_with_norm_(self.objective.parameters(), self.config.optimiser.clip, norm, foreach=True)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]
        first = (self.bad_step < 0) & ~norm.isfinite()
        self.bad_step.copy_(torch.where(first, self.now, self.bad_step))
        self.stop.copy_(self.bad_step >= 0)
        self.optimiser.step()
        self.sums["norm"] += norm
        self.sums["steps"] += 1

    def _measure(self, batch: Batch) -> None:
        with torch.no_grad(), self.fabric.autocast():
            losses = self.objective(batch)
            add(self.scores, losses, losses["loss"].float() * losses["count"])

    def _optimiser(self) -> torch.optim.Optimizer:
        c, cuda = self.config.optimiser, self.device.type == "cuda"
        kind = torch.optim.AdamW if c.kind == "adamw" else torch.optim.Adam
        fused = not self.sharded  # one kernel for all weights, which minds the flag below
        # A rate in a tensor can change inside a graph.
        rate = torch.tensor(c.lr, device=self.device) if cuda and fused else c.lr
        optimiser = kind(
            self.call.parameters(), rate, c.betas, c.eps, c.weight_decay, fused=fused, capturable=cuda and fused
        )
        self.stop = torch.zeros((), device=self.device)
        if fused:
            optimiser.found_inf = self.stop  # type: ignore[attr-defined]
        return optimiser

    @property
    def _steps_device(self) -> torch.device:
        return self.device if not self.sharded else torch.device("cpu")

    def _set_rate(self, rate: float) -> None:
        for group in self.optimiser.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _zeros(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: torch.zeros((), device=self.device) for name in names}


def scores(loss: float, accuracy: float | None) -> dict[str, float]:
    """What is reported of a loss in nats: accuracy for a classifier, else perplexity."""
    if accuracy is not None:
        return {"loss": loss, "accuracy": accuracy}
    return {"loss": loss, "perplexity": perplexity(loss)}


def perplexity(loss: float) -> float:
    return float(torch.tensor(loss, dtype=torch.float64).exp())


def add(sums: dict[str, Tensor], losses: dict[str, Tensor], loss: Tensor) -> None:
    sums["loss"] += loss.detach()
    for name in ("correct", "count"):
        if name in losses:
            sums[name] += losses[name]


def split(batch: Batch, pieces: int) -> list[Batch]:
    if pieces == 1:
        return [batch]
    parts = {name: tensor.chunk(pieces) for name, tensor in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(pieces)]


def whole(value: Tensor) -> Tensor:
    """A sharded tensor in one piece; always on the host and apart from what the next step changes."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]
    return value.detach().to("cpu", copy=True)


def placed(value: Tensor, like: Tensor) -> Tensor:
    """On the device of a parameter, and sharded as it is."""
    value = value.to(like.device)
    if not hasattr(like, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)  # type: ignore[attr-defined]


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Into the model's own tensors: an optimiser and a CUDA graph go on using them."""
    own = model.state_dict()
    unknown = [name for name in weights if name not in own]
    filled = {own[name].data_ptr() for name in weights if name in own}
    missing = [name for name, tensor in own.items() if name not in weights and tensor.data_ptr() not in filled]
    if unknown or missing:
        raise ValueError(f"weights: expected those of this model; missing {missing[:3]}, unknown {unknown[:3]}")
    for name, value in weights.items():
        if own[name].shape != value.shape:
            raise ValueError(f"weights: {name}: expected shape {tuple(own[name].shape)}, got {tuple(value.shape)}")
        own[name].copy_(placed(value, own[name]))
