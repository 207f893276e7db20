"""Tensor parallelism of the modules: styles for `torch.distributed.tensor.parallel.parallelize_module`.

Each process of a tensor-parallel mesh holds some heads of every attention and some tokens of the vocabulary. Weights
are DTensors; the activations within a module are plain tensors with the process's own heads, so everything that an
attention does (rotary positions, masks, caches, M-steps, packed batches) works on them as it does on all heads.

Import it only where it is used: it loads `torch.distributed.tensor`.

B batch, H heads, T positions, E width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import linear, pad
from torch.utils.checkpoint import checkpoint

from mgk.nn.attention import MixtureAttention
from mgk.nn.output import IGNORE, MAX_LOGITS, TiedSoftmax

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class HeadParallel(ParallelStyle):
    """Shard what a `MixtureAttention` keeps per head: `shift`, `log_prior` and `log_variance`, learned or not.

    The four projections have styles of their own: `ColwiseParallel` for queries, keys and values, `RowwiseParallel` for
    the output.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MixtureAttention):
            raise TypeError(f"module: expected a MixtureAttention for HeadParallel, got {type(module).__name__}")
        check_heads(module, device_mesh)
        for name in ("shift", "log_prior", "log_variance"):
            shard_rows(module, name, device_mesh)
        module.register_forward_pre_hook(_Replicated(device_mesh), with_kwargs=True)
        return module


class _Replicated:
    """Make the inputs of the projections DTensors, so that their gradients are summed over the processes once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("need_weights"):
            raise ValueError("need_weights: expected False in tensor parallelism (a process has some heads), got True")
        made: dict[int, Tensor] = {}  # query, key and value stay one object if they are one

        def replicated(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                return value
            if id(value) not in made:
                made[id(value)] = DTensor.from_local(value, self.mesh, [Replicate()], run_check=False)
            return made[id(value)]

        named = {name: replicated(kwargs[name]) for name in ("query", "key", "value") if name in kwargs}
        return (*map(replicated, args[:3]), *args[3:]), kwargs | named


def check_heads(module: MixtureAttention, mesh: DeviceMesh) -> None:
    """Require that every process gets equally many heads."""
    for name in ("num_heads", "num_kv_heads"):
        heads = getattr(module, name, None)
        if heads is not None and heads % mesh.size():
            raise ValueError(
                f"{name}: expected a multiple of the {mesh.size()} processes of the tensor-parallel mesh, got {heads}"
            )


def shard_rows(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Shard the first axis of a parameter or buffer, if the module has it."""
    value = getattr(module, name)
    if value is None:
        return
    sharded: Tensor = distribute_tensor(value.detach(), mesh, [Shard(0)])
    if isinstance(value, nn.Parameter):
        sharded = nn.Parameter(sharded, requires_grad=value.requires_grad)
    setattr(module, name, sharded)


class VocabularyParallel(ParallelStyle):
    """Replace a `TiedSoftmax` by one for an embedding that is sharded over the vocabulary."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, TiedSoftmax) or module.cluster_weight is not None:
            raise TypeError(f"module: expected a TiedSoftmax without cutoffs for VocabularyParallel, got {module}")
        module.__class__ = ShardedSoftmax
        return module


class ShardedSoftmax(TiedSoftmax):
    """A `TiedSoftmax` without cutoffs, whose process has the logits of its own tokens only.

    The processes exchange three numbers per position: the largest logit, the sum of the exponentials and the logit of
    the target. The bias stays whole on every process.
    """

    @property
    def capturable(self) -> bool:
        return False

    def forward(self, hidden: Float[Tensor, "... e"], weight: Float[Tensor, "v e"]) -> Float[Tensor, "... v"]:
        """Return the logits of the whole vocabulary on every process."""
        logits: Tensor = self._logits(hidden, weight).redistribute(placements=[Replicate()]).to_local()
        return logits[..., : self.sizes[0]].float()

    def losses(
        self, hidden: Float[Tensor, "t e"], weight: Float[Tensor, "v e"], target: Int[Tensor, " t"]
    ) -> Float[Tensor, " t"]:
        rows = max(1, MAX_LOGITS // len(weight))
        if len(hidden) <= rows:
            return self._losses(hidden, weight, target)
        parts = [
            checkpoint(self._losses, part, weight, wanted, use_reentrant=False, preserve_rng_state=False)
            for part, wanted in zip(torch.split(hidden, rows), torch.split(target, rows), strict=True)
        ]
        return torch.cat(parts)

    def total_loss(
        self, hidden: Float[Tensor, "t e"], weight: Float[Tensor, "v e"], target: Int[Tensor, " t"]
    ) -> Float[Tensor, ""]:
        """Return the sum of `losses`."""
        return self.losses(hidden, weight, target).sum()

    def _logits(self, hidden: Tensor, weight: Tensor) -> DTensor:
        """The logits, sharded over the last axis; -inf for rows of the weight behind the vocabulary."""
        if not isinstance(weight, DTensor):
            raise TypeError(f"weight: expected a DTensor, sharded over the vocabulary, got {type(weight).__name__}")
        mesh, vocabulary = weight.device_mesh, self.sizes[0]
        own: Tensor = hidden.new_zeros(vocabulary, dtype=weight.dtype) if self.bias is None else self.bias
        bias = pad(own, (0, len(weight) - vocabulary), value=-torch.inf)
        whole = (DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in (hidden, bias))
        inputs, offsets = whole  # their gradients are summed over the processes
        return linear(inputs, weight, offsets.redistribute(placements=[Shard(0)]))  # type: ignore[return-value]

    def _losses(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = self._logits(hidden, weight)
        mesh = logits.device_mesh
        first = mesh.get_local_rank() * -(-logits.shape[-1] // mesh.size())  # as Shard splits an axis
        return _TokenLosses.apply(logits.to_local().float(), target, first, mesh.get_group())  # type: ignore[no-any-return, no-untyped-call]


class _TokenLosses(torch.autograd.Function):
    """-log softmax(logits)[target] of the positions, of logits (T, part of V) that begin with token `first`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        largest = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        weights = (logits - largest[:, None]).exp()
        own = (target >= first) & (target < first + logits.shape[-1])
        place = torch.where(own, target - first, 0)[:, None]
        wanted = logits.gather(1, place)[:, 0] if logits.shape[-1] else largest
        sums = torch.stack((weights.sum(-1), wanted.masked_fill(~own, 0)))
        dist.all_reduce(sums, group=group)
        ignored = target == IGNORE
        ctx.save_for_backward(weights / sums[0, :, None], place, own, ignored)
        return (sums[0].log() + largest - sums[1]).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, place, own, ignored = ctx.saved_tensors
        hit = torch.zeros_like(probabilities)
        if hit.shape[-1]:
            hit.scatter_(1, place, own[:, None].to(hit.dtype))
        return (probabilities - hit) * grad.masked_fill(ignored, 0)[:, None], None, None, None
