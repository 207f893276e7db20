"""The model, its optimiser and one training step, arranged so that the host does not wait for the device.

Losses are summed on the device and read when a line is logged. A gradient that is not finite sets a flag on the device
that disables all further updates, so that the weights which led to it are still there when the host reads the flag.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_leaves

from mgk.models import build
from mgk.ops.api import HAS_TRITON
from mgk.train.config import Config
from mgk.train.graph import Batch, Graphs, to_device

if TYPE_CHECKING:
    from lightning_fabric import Fabric

SUMS = ("loss", "correct", "count", "norm", "steps")


class Objective(nn.Module):
    """The model's loss as a module, for Fabric and torch.compile."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.model.loss(batch)  # type: ignore[operator, no-any-return]


class Learner:
    """The part of a run that lives on the device: model, optimiser and sums of the losses."""

    def __init__(self, fabric: Fabric, config: Config, adapt: Callable[[nn.Module], None] | None = None) -> None:
        self.fabric, self.config, self.device = fabric, config, fabric.device
        torch.manual_seed(config.seed)  # the same initial weights for any number of processes
        self.objective = Objective(self.build(config))
        if adapt is not None:
            adapt(self.model)
        self.sharded = config.strategy == "fsdp"
        call = torch.compile(self.objective) if self._compiles else self.objective
        self.call = fabric.setup_module(call)  # type: ignore[arg-type]
        self.optimiser: Any = fabric.setup_optimizers(self._optimiser())
        self.sums = self._zeros(SUMS)
        self.scores = self._zeros(SUMS[:3])
        self.peak = torch.tensor([-torch.inf, -1.0], dtype=torch.float64, device=self.device)  # largest loss, its step
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=self.device)
        self.now = torch.zeros((), dtype=torch.int64, device=self.device)
        # Graphs need one device, shapes that depend on the batch alone, and no read of a value on the host.
        possible = self.device.type == "cuda" and fabric.world_size == 1
        possible = possible and self.model.capturable and not config.model.recompute
        if config.graphs == "on" and not possible:
            raise ValueError(
                "graphs: on needs one CUDA GPU, Triton for an adaptive softmax or causal linear attention, and no "
                "recomputation"
            )
        self.run: Callable[[Batch], None] = lambda batch: self._update(to_device(batch, self.device))
        self._score: Callable[[Batch], None] = lambda batch: self._measure(to_device(batch, self.device))
        if possible and config.graphs != "off":
            train = Graphs(self._update, self.device)
            self.run, self._score = train, Graphs(self._measure, self.device, train.pool)

    @property
    def _compiles(self) -> bool:
        one_gpu = self.device.type == "cuda" and self.fabric.world_size == 1 and HAS_TRITON
        return self.config.compile == "on" or (self.config.compile == "auto" and one_gpu)

    @staticmethod
    def build(config: Config) -> nn.Module:
        return build(config.model)

    @property
    def model(self) -> Any:
        return self.objective.model

    @property
    def rate(self) -> float:
        """The learning rate of the last update."""
        return float(self.optimiser.optimizer.param_groups[0]["lr"])

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.objective.parameters())

    def update(self, step: int, batch: Batch) -> None:
        """Make update number `step`, which depends on the weights, the batch and the step alone."""
        self.seed(step)
        self._set_rate(self.config.optimiser.learning_rate(step, self.config.steps))
        self.now.fill_(step)
        self.objective.train()
        self.run(batch)

    def seed(self, step: int) -> None:
        """Seed dropout from (seed, step, process), so that no generator state has to be saved."""
        text = f"{self.config.seed} {step} {self.fabric.global_rank}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little"))

    def read(self) -> dict[str, float]:
        """Return the means since the last call, over all processes. Waits for the device."""
        peak, step = self.peak_of_all().tolist()
        self.peak[0] = -torch.inf
        loss, correct, count, norm, steps = self._take(self.sums)
        steps = max(steps, 1)
        result = {"loss": loss / steps, "norm": norm / steps, "peak": peak, "peak_step": step}
        return result | ({"accuracy": correct / count} if self.classifies and count else {})

    @property
    def classifies(self) -> bool:
        return self.config.kind not in ("language", "translation")

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the mean loss over a split, and accuracy or perplexity. Waits for the device once."""
        self.objective.eval()
        for batch in batches:
            self._score(batch)
        loss, correct, count = self._take(self.scores)
        mean = loss / max(count, 1)
        return {"loss": mean} | (
            {"accuracy": correct / max(count, 1)} if self.classifies else {"perplexity": perplexity(mean)}
        )

    def failed_at(self) -> int | None:
        """Return the first step whose gradient was not finite, or None. Waits for the device."""
        step = int(self.bad_step)
        return None if step < 0 else step

    def non_finite(self) -> str | None:
        """Return the name of a weight, or of a running mean of the optimiser, that is not finite. Waits for the device.

        A gradient that is not finite makes no update, but an update can overflow, or divide by zero with an eps of 0.
        """
        tensors = {name: tensor for name, tensor in self.tensors().items() if tensor.is_floating_point()}
        shards = map(local, tensors.values())
        largest = torch.stack([t.abs().amax().to(self.stop) if t.numel() else self.stop for t in shards])
        bad: Any = (~largest.isfinite()).float()
        if self.fabric.world_size > 1:
            bad = self.fabric.all_reduce(bad, reduce_op="sum")
        return next((name for name, value in zip(tensors, bad.tolist(), strict=True) if value), None)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimiser state as they are on the device, shards included, by dotted names."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) not in seen:  # tied weights are one tensor
                seen.add(id(value))
                found[f"weights.{name}"] = value.detach()
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimiser.optimizer.state[parameter].items():
                found[f"optimiser.{name}.{key}"] = value.detach()
        return found

    def sums_of_all(self) -> dict[str, Any]:
        """The running sums since the last log line, over all processes, for a checkpoint. Waits for the device."""
        sums: Any = torch.stack(list(self.sums.values()))
        if self.fabric.world_size > 1:
            sums = self.fabric.all_reduce(sums, reduce_op="sum")
        return {"sums": {n: v.clone() for n, v in zip(self.sums, sums.cpu(), strict=True)}, "peak": self.peak_of_all()}

    def peak_of_all(self) -> Tensor:
        """(2,), the largest loss of a step since the last log line, and that step. Waits for the device."""
        if self.fabric.world_size == 1:
            return self.peak.cpu().clone()
        largest: Any = self.fabric.all_reduce(self.peak[0].clone(), reduce_op="max")
        step: Any = torch.where(self.peak[0] == largest, self.peak[1], -1.0)
        return torch.stack([largest, self.fabric.all_reduce(step, reduce_op="max")]).cpu()  # type: ignore[list-item]

    def weights(self) -> dict[str, Tensor]:
        """Weights on the host. Collective if weights are sharded."""
        return {name: to_host(value) for name, value in self.model.state_dict().items()}

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], state: dict[str, Any] | None = None) -> None:
        """Load the results of `weights` and, to continue training, of `state`."""
        load_weights(self.model, weights)
        if state is None:
            return
        for name, parameter in self.model.named_parameters():
            self.optimiser.optimizer.state[parameter] = {
                key: placed(value, parameter) if value.dim() else value.to(self.device)
                for key, value in state["optimiser"][name].items()
            }
        self.load_sums(state)

    def create_state(self, shapes: dict[str, Any]) -> None:
        """Create the optimiser's state for the tensors of a checkpoint, given by the names of `tensors`."""
        for name, parameter in self.model.named_parameters():
            start = f"optimiser.{name}."
            own = self.optimiser.optimizer.state[parameter]
            for key, (size, kind) in ((n.removeprefix(start), s) for n, s in shapes.items() if n.startswith(start)):
                like = torch.zeros_like(parameter, dtype=kind) if size else torch.zeros((), dtype=kind)
                own[key] = like.detach().to(self.device)

    def load_sums(self, state: dict[str, Any]) -> None:
        """Continue the sums of a checkpoint; `sums_of_all` has added those of all processes."""
        for name, value in state["sums"].items():
            self.sums[name].copy_(value if self.fabric.global_rank == 0 else torch.zeros_like(value))
        if "peak" in state:  # older checkpoints lack it
            self.peak.copy_(state["peak"])

    def _update(self, batch: Batch) -> None:
        """Forward, backward and update on the device. Captured in a CUDA graph: no value may be read on the host."""
        self.optimiser.zero_grad(set_to_none=True)
        pieces = split(batch, self.config.accumulate)
        before = self.sums["loss"].clone()
        for number, piece in enumerate(pieces):
            waits = self.fabric.world_size > 1 and not self.sharded and number < len(pieces) - 1
            with self.fabric.no_backward_sync(self.call, enabled=waits):
                losses = self.call(piece)
                self.fabric.backward(losses["loss"] / len(pieces))
            add(self.sums, losses, losses["loss"] / len(pieces))
        gradients = [p.grad for p in self.objective.parameters() if p.grad is not None]
        latest = torch.stack([(self.sums["loss"] - before).double(), self.now.double()])
        self.peak.copy_(torch.where(latest[0] > self.peak[0], latest, self.peak))
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
        # A CUDA graph can read a learning rate that changes only from a tensor on the device.
        graphs = cuda and not self.sharded
        rate = torch.tensor(c.lr, device=self.device) if graphs else c.lr
        # Fused: one kernel for all weights, which skips the update if found_inf is set.
        optimiser = kind(self._groups(), rate, c.betas, c.eps, c.weight_decay, fused=True, capturable=graphs)
        self.stop = torch.zeros((), device=self.device)
        optimiser.found_inf = self.stop  # type: ignore[attr-defined]
        return optimiser

    def _groups(self) -> list[Any]:
        """The weights for the optimiser, in two groups if some of them do not decay."""
        named = list(self.call.named_parameters())
        if self.config.optimiser.decay == "all":
            return [weight for _, weight in named]
        matrix = {name: name.endswith("weight") and weight.dim() > 1 for name, weight in named}
        decaying, others = ([weight for name, weight in named if matrix[name] is kind] for kind in (True, False))
        return [{"params": decaying}, {"params": others, "weight_decay": 0.0}]

    def _set_rate(self, rate: float) -> None:
        for group in self.optimiser.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _zeros(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: torch.zeros((), device=self.device) for name in names}

    def _take(self, sums: dict[str, Tensor]) -> list[float]:
        """Read sums over all processes, and set them to zero."""
        values: Any = torch.stack(list(sums.values()))
        if self.fabric.world_size > 1:
            values = self.fabric.all_reduce(values, reduce_op="sum")
        for total in sums.values():
            total.zero_()
        return values.tolist()  # type: ignore[no-any-return]


def perplexity(loss: float) -> float:
    return float(torch.tensor(loss, dtype=torch.float64).exp())


def add(sums: dict[str, Tensor], losses: dict[str, Tensor], loss: Tensor) -> None:
    """Add the loss and the counts of a batch to running sums."""
    sums["loss"] += loss.detach()
    for name in ("correct", "count"):
        if name in losses:
            sums[name] += losses[name]


def split(batch: Batch, pieces: int) -> list[Batch]:
    """Split a batch into micro-batches."""
    if pieces == 1:
        return [batch]
    parts = {name: tensor.chunk(pieces) for name, tensor in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(pieces)]


def local(tensor: Tensor) -> Tensor:
    """Return the shard of a tensor that this process holds, or the tensor if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator, no-any-return]


def to_host(value: Tensor) -> Tensor:
    """Copy a tensor to the host, gathering its shards."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]
    return value.detach().to("cpu", copy=True)


def placed(value: Tensor, like: Tensor) -> Tensor:
    """Move a tensor to the device of a parameter, and shard it likewise."""
    value = value.to(like.device)
    if not hasattr(like, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)  # type: ignore[attr-defined]


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into the model's own tensors, which an optimiser or a CUDA graph may refer to."""
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


def find_non_finite(objective: nn.Module, batch: Batch) -> str:
    """Describe the first value that is not finite in one forward and backward pass."""
    for name, parameter in objective.named_parameters():
        if not parameter.isfinite().all():
            return f"weight {name.removeprefix('model.')} is not finite"
    found: list[str] = []

    def hook(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        if not found and any(not tensor.isfinite().all() for tensor in tensors):
            found.append(f"layer {name.removeprefix('model.')} ({type(module).__name__})")

    hooks = [m.register_forward_hook(partial(hook, name)) for name, m in objective.named_modules() if name]
    try:
        objective.zero_grad(set_to_none=True)
        loss = objective(batch)["loss"]
        if found:
            return found[0]
        if not loss.isfinite():
            return "the loss, although the outputs of all layers are finite"
        loss.backward()
    finally:
        for handle in hooks:
            handle.remove()
    for name, parameter in reversed(list(objective.named_parameters())):  # backward starts at the last layer
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"gradient of {name.removeprefix('model.')}"
    return "a value that is finite when the step is repeated eagerly"
