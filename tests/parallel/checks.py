"""What must hold on several processes: they compute what one computes, values, gradients and updates.

All inputs are in float64: sums in another order differ by some 1e-15 times the size of their terms, at most 1e2 here.
EXACT leaves two digits more. The language model rounds its logits to float32, so that its losses, of size 4, differ by
4 * 2^-24 and more after updates: ROUNDED.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import mgk
from mgk.models import (
    LanguageModelConfig,
    build,
    clip_grad_norm_,
    context_parallel,
    shard_sequence,
    tensor_parallel,
    unshard_sequence,
)
from mgk.ops.ring import Ring, ring_attention
from tests.parallel.group import on

EXACT, ROUNDED = 1e-11, 2e-6
VOCABULARY = 37  # no multiple of the number of processes
TINY: dict[str, Any] = {
    "heads": 4, "head_dim": 4, "layers": 2, "width": 8, "hidden": 12, "vocabulary": VOCABULARY, "cutoffs": (),
    "max_length": 16, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def close(name: str, actual: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


def mesh_of(*sizes: int, names: tuple[str, ...] = ("tp",)) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def language_model(**options: Any) -> Any:
    return build(LanguageModelConfig(**TINY | options)).double()


def batches(count: int, rows: int = 2, length: int = 8) -> list[dict[str, Tensor]]:
    draw = torch.randint(VOCABULARY, (count, rows, length + 1))
    return [{"tokens": each[:, :-1], "target": each[:, 1:]} for each in draw]


def train(model: nn.Module, data: list[dict[str, Tensor]], clip: Any) -> list[Tensor]:
    """Return the losses of some steps, in which the norm of the gradients is clipped."""
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for batch in data:
        loss = model.loss(batch)["loss"]
        optimiser.zero_grad()
        loss.backward()
        clip(model.parameters(), 0.5)
        optimiser.step()
        losses.append(loss.detach())
    return losses


def same_training(one: nn.Module, many: nn.Module, data: list[dict[str, Tensor]], parts: Any = None) -> None:
    """`many` sees its part of every batch, or all of it; the losses of its processes have the mean of `one`."""
    expected = train(one, data, nn.utils.clip_grad_norm_)
    for loss, wanted in zip(train(many, parts or data, clip_grad_norm_), expected, strict=True):
        dist.all_reduce(loss)
        close("loss", loss / dist.get_world_size(), wanted, ROUNDED)
    actual = many.state_dict()
    for name, tensor in one.state_dict().items():
        close(name, actual[name], tensor, ROUNDED)


MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax", "attention_bias": True},
    "smgk": {"attention": "smgk", "learn_variance": True, "norm": "pre"},
    "mgk": {"attention": "mgk", "positions": "learned", "attention_bias": True},
    "hard": {"attention": "smgk", "e_step": "hard"},
    "rotary": {"attention": "smgk", "positions": "rotary", "recompute": True},
    "mlk": {"attention": "mlk"},
    "smlk mixing keys": {"attention": "smlk", "mixing": "keys", "prior": "uniform"},
    "em": {"attention": "smgk", "prior": "em", "means": "em", "recompute": True},
    "em by position": {"attention": "mgk", "prior": "em", "prior_positions": 16},
    "adaptive": {"attention": "smgk", "cutoffs": (10, 20)},
}


@on(2)
def check_tensor_parallel_training() -> None:
    for name, options in MODELS.items():
        torch.manual_seed(0)
        one = language_model(**options)
        many = tensor_parallel(copy.deepcopy(one), mesh_of(2))
        try:
            same_training(one, many, batches(3))
        except Exception as error:
            raise AssertionError(name) from error


@on(2, 4)
def check_context_parallel_training() -> None:
    world = dist.get_world_size()
    for name in ("softmax", "smgk", "mgk", "hard", "rotary", "mlk", "smlk mixing keys"):
        torch.manual_seed(0)
        one = language_model(**MODELS[name])
        many, mesh = copy.deepcopy(one), mesh_of(world, names=("cp",))
        for layer in many.encoder.stack.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(many, mesh=mesh)
        register_fsdp_forward_method(many, "loss")
        context_parallel(many, mesh)
        data = batches(3, length=16)
        parts = [{name: shard_sequence(tensor, mesh) for name, tensor in batch.items()} for batch in data]
        try:
            same_training(one, many, data, parts)
        except Exception as error:
            raise AssertionError(name) from error


@on(2, 4)
def check_ring_attention() -> None:
    """With padding, groups, windows and unequal variances; gradients too, those of keys at home with their process."""
    world = dist.get_world_size()
    mesh = mesh_of(world, names=("cp",))
    ring, length = Ring(mesh), 6 * 2 * world
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    key_mask = torch.rand(2, length, generator=generator) < 0.7
    query_mask = torch.rand(2, length, generator=generator) < 0.9
    inputs = (
        draw(2, 4, length, 3),
        draw(2, 2, length, 3),
        draw(2, 2, length, 5),
        draw(4, 2, 3),
        draw(4, 2),
        draw(4, 2).exp(),
    )
    upstream = draw(2, 4, length, 5)
    for is_causal, window in ((False, None), (True, None), (True, 1), (True, 4), (True, 17), (True, 10**3)):
        leaves = [each.clone().requires_grad_() for each in inputs]
        query, key, value, shift, prior, variance = leaves
        expected = mgk.smgk_attention(
            query, key, shift, value, prior, variance=variance, is_causal=is_causal, window=window, key_mask=key_mask, query_mask=query_mask,
        )  # fmt: skip
        wanted = torch.autograd.grad(expected, leaves, upstream)

        def attend(
            q: Tensor, k: Tensor, v: Tensor, keys: Tensor, queries: Tensor, causal: bool, window: int | None, *p: Tensor
        ) -> Any:
            return mgk.smgk_attention(q, k, p[0], v, p[1], variance=p[2], is_causal=causal, window=window, key_mask=keys, query_mask=queries, return_lse=True)  # fmt: skip

        own = [shard_sequence(each, mesh, 2).requires_grad_() for each in inputs[:3]]
        shared = [each.clone().requires_grad_() for each in inputs[3:]]
        output = ring_attention(
            attend, *own, *shared, ring=ring, is_causal=is_causal, window=window,
            key_mask=shard_sequence(key_mask, mesh), query_mask=shard_sequence(query_mask, mesh),
        )  # fmt: skip
        close("output", unshard_sequence(output, mesh, 2), expected.detach())
        found = torch.autograd.grad(output, own + shared, shard_sequence(upstream, mesh, 2))
        for name, grad, wish in zip(("query", "key", "value"), found, wanted, strict=False):
            close(f"gradient of {name} for window {window}", unshard_sequence(grad, mesh, 2), wish)
        for name, grad, wish in zip(("shift", "prior", "variance"), found[3:], wanted[3:], strict=True):
            dist.all_reduce(grad)
            close(f"gradient of {name} for window {window}", grad, wish)
