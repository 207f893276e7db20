"""Models on several processes: tensor and context parallelism, and clipping of gradients that are sharded.

The sharding itself is PyTorch's: DTensor, `parallelize_module`, `fully_shard`. See docs/parallel.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgk.models.classifier import Classifier
from mgk.models.encoder import TokenEncoder
from mgk.models.language import LanguageModel
from mgk.models.vision import VisionTransformer
from mgk.nn import Block, MixtureAttention
from mgk.ops.dtensor import is_dtensor
from mgk.ops.ring import Ring

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

M = TypeVar("M", bound=nn.Module)


def tensor_parallel_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the plan for `torch.distributed.tensor.parallel.parallelize_module`, for a model with attention of mgk.

    - Attention: queries, keys and values column-wise, so that a process has whole heads, the output row-wise; shifts,
      priors and variances with their heads.
    - Feed-forward networks: the first layer column-wise, the second row-wise.
    - Vocabulary of a language model without cutoffs: embedding and softmax are sharded over the tokens.

    Everything else, with an adaptive softmax its vocabulary too, is the same on all processes.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    from mgk.nn.parallel import HeadParallel, VocabularyParallel

    plan: dict[str, ParallelStyle] = {}

    modules = dict(model.named_modules())

    def add(name: str, parts: Iterable[str], style: ParallelStyle) -> None:
        for part in parts:
            path = f"{name}.{part}".lstrip(".")
            if path in modules and any(True for _ in modules[path].parameters()):
                plan[path] = style

    for name, module in modules.items():
        if isinstance(module, MixtureAttention):
            plan[name] = HeadParallel()
            add(name, ("query_proj", "key_proj", "value_proj"), ColwiseParallel())
            add(name, ("out_proj",), RowwiseParallel())
            # One weight for all heads: axis 2 of (B,N,H,D) is "sequence_dim", its gradient a sum over the processes.
            add(name, ("query_norm", "key_norm"), SequenceParallel(sequence_dim=2, use_local_output=True))
        elif isinstance(module, Block):
            add(name, ("up", "gate"), ColwiseParallel())
            add(name, ("down",), RowwiseParallel())
        elif isinstance(module, LanguageModel) and module.output.cluster_weight is None:
            add(name, ("encoder.tokens",), RowwiseParallel(input_layouts=Replicate()))
            add(name, ("lm_head",), ColwiseParallel())
            plan[f"{name}.output".lstrip(".")] = VocabularyParallel()
    return plan


def tensor_parallel(model: M, mesh: DeviceMesh, *, data_mesh: DeviceMesh | None = None) -> M:
    """Shard a model over the processes of a one-dimensional mesh, in place: `tensor_parallel_plan`, applied.

    Parameters and buffers become those of the first process of the mesh. In training with dropout, the processes of
    one mesh must have the same random seed.

    Args:
        model: a model of `mgk.models`, or any module that has `mgk.nn.MixtureAttention` in it.
        mesh: the processes that share a model.
        data_mesh: the processes that have other samples, over which M-steps add up their statistics. Only models with
            an M-step (prior="em", means="em") need it, if there are such processes.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    _check_mesh("mesh", mesh)
    attentions = [module for module in model.modules() if isinstance(module, MixtureAttention)]
    if not attentions:
        raise ValueError("model: expected a module with mgk.nn.MixtureAttention in it, got none")
    if data_mesh is None and mesh.size() < dist.get_world_size() and any(each.em_buffers for each in attentions):
        raise ValueError("data_mesh: expected the mesh of the processes with other samples, for M-steps, got None")
    from mgk.nn.parallel import check_heads

    for attention in attentions:
        check_heads(attention, mesh)
    parallelize_module(model, mesh, tensor_parallel_plan(model))
    first = dist.get_global_rank(mesh.get_group(), 0)
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_dtensor(tensor):
            dist.broadcast(tensor.detach(), first, mesh.get_group())
    for attention in attentions:
        attention.m_step_groups = () if data_mesh is None else tuple(data_mesh.get_all_groups())
    return model


def context_parallel(model: M, mesh: DeviceMesh) -> M:
    """Spread the sequences of a model over the processes of a one-dimensional mesh, in place.

    Every process then calls the model with its part of tokens and targets (`shard_sequence`). Parameters are the same
    on all processes; their gradients are summed or averaged as in data parallelism, for example by `fully_shard`.

    Args:
        model: a `LanguageModel`, or a module with `mgk.nn.MixtureAttention` in it that computes everything else
            position by position.
        mesh: the processes that share a sequence.
    """
    if isinstance(model, Classifier | VisionTransformer):
        raise TypeError(
            "model: expected a LanguageModel or a module that computes everything but attention position by position, "
            f"got a {type(model).__name__}, which averages over positions"
        )
    attentions = [module for module in model.modules() if isinstance(module, MixtureAttention)]
    if not attentions:
        raise ValueError("model: expected a module with mgk.nn.MixtureAttention in it, got none")
    if any(each.em_buffers for each in attentions):
        raise ValueError("model: expected prior and means other than 'em' (an M-step needs all pairs), got 'em'")
    ring = Ring(mesh)
    for module in model.modules():
        if isinstance(module, MixtureAttention | TokenEncoder):
            module.ring = ring
    return model


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters of which some are DTensors, on any meshes. Returns the norm."""
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if is_dtensor(parameter.grad) else None  # type: ignore[attr-defined]
            groups.setdefault(mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([each.grad for each in group]) for group in groups.values()]  # type: ignore[misc]
    norms = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]  # type: ignore[attr-defined]
    total = torch.stack(norms).norm() if norms else torch.zeros(())
    for group in groups.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _check_mesh(name: str, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"{name}: expected a mesh of one dimension, such as mesh['tp'], got {mesh}")
