"""Operators on DTensors, ring attention, and what is refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import mgk
from mgk.models import (
    ClassifierConfig,
    build,
    context_parallel,
    shard_sequence,
    tensor_parallel,
    unshard_sequence,
)
from mgk.ops.ring import Ring, ring_attention
from tests.parallel.common import close, language_model, mesh_of
from tests.parallel.group import on

Placements = tuple[Any, ...]
OPERATORS: dict[str, tuple[Any, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "smgk": (
        mgk.smgk_attention,
        {"query": (2, 4, 5, 3), "key": (2, 2, 7, 3), "shift": (4, 2, 3), "value": (2, 2, 7, 2), "log_prior": (4, 2)},
        {"is_causal": True, "return_lse": True, "window": 3},
    ),
    "mgk, one head of keys": (
        mgk.mgk_attention,
        {"query": (2, 4, 5, 3), "key": (2, 1, 2, 7, 3), "value": (2, 1, 7, 2), "log_prior": (4, 2, 7)},
        {"variance": 2.0, "e_step": "soft"},
    ),
    "reference": (
        mgk.mgk_attention, {"query": (2, 4, 5, 3), "key": (2, 4, 2, 7, 3), "value": (2, 4, 7, 2)},
        {"impl": "reference", "e_step": "hard"},
    ),
    "smlk": (
        mgk.smlk_attention,
        {"query": (2, 4, 5, 3), "key": (2, 4, 5, 3), "shift": (4, 2, 3), "value": (2, 4, 5, 2), "log_prior": (4, 2)},
        {"is_causal": True},
    ),
    "weights": (mgk.attention_weights, {"query": (2, 4, 5, 3), "key": (2, 4, 2, 7, 3), "log_prior": (4, 2)}, {}),
    "responsibilities": (mgk.responsibilities, {"query": (2, 4, 5, 3), "key": (2, 4, 2, 7, 3)}, {}),
    "packed": (
        mgk.smgk_varlen_attention,
        {"query": (7, 4, 3), "key": (7, 2, 3), "shift": (4, 2, 3), "value": (7, 2, 2), "log_prior": (4, 2)},
        {"cu_seq_q": torch.tensor([0, 3, 7], dtype=torch.int32), "cu_seq_k": torch.tensor([0, 5, 7], dtype=torch.int32),
         "max_q": 4, "max_k": 5, "return_lse": True},
    ),
}  # fmt: skip


@on(4)
def check_operators_take_dtensors() -> None:
    """Sharded over samples along one dimension of the mesh and over heads along the other, or replicated."""
    mesh, generator = mesh_of(2, 2, names=("data", "heads")), torch.Generator().manual_seed(0)
    per_head = ("shift", "log_prior")
    for case, (function, shapes, options) in OPERATORS.items():
        packed = "cu_seq_q" in options
        inputs = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            for name, shape in shapes.items()
        }
        expected = as_tuple(function(**inputs, **options))
        upstream = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in expected]
        wanted = torch.autograd.grad(expected, list(inputs.values()), upstream)
        for sample_bits, head_bits in ((31, 31), (31, 0), (0, 31), (0, 0), (1, 21), (27, 2)):
            placements = {}
            for number, (name, shape) in enumerate(shapes.items()):
                by_sample = sample_bits >> number & 1 and name not in per_head and not packed
                by_head = head_bits >> number & 1 and shape[0 if name in per_head else 1] > 1
                placements[name] = (
                    Shard(0) if by_sample else Replicate(),
                    Shard(0 if name in per_head else 1) if by_head else Replicate(),
                )
            sharded = {
                name: distribute_tensor(each.detach(), mesh, placements[name]).requires_grad_()
                for name, each in inputs.items()
            }
            found = as_tuple(function(**sharded, **options))
            parts = zip(upstream, found, strict=True)
            directions = [distribute_tensor(each, mesh, output.placements) for each, output in parts]
            grads = torch.autograd.grad(found, list(sharded.values()), directions)
            for each, wish in zip(found, expected, strict=True):
                close(f"{case} {placements}", each, wish.detach())
            for name, grad, wish in zip(inputs, grads, wanted, strict=True):
                close(f"{case} {placements}: gradient of {name}", grad, wish)


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


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
    shapes = (2, 4, length, 3), (2, 2, length, 3), (2, 2, length, 5), (4, 2, 3), (4, 2)
    inputs = *(draw(*shape) for shape in shapes), draw(4, 2).exp()
    upstream = draw(2, 4, length, 5)
    masks: dict[str, Any] = {"key_mask": key_mask, "query_mask": query_mask}
    own_masks: dict[str, Any] = {name: shard_sequence(mask, mesh) for name, mask in masks.items()}

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: Any, queries: Any, causal: bool, window: Any, *p: Tensor) -> Any:
        seen: dict[str, Any] = {"is_causal": causal, "window": window, "key_mask": keys, "query_mask": queries}
        return mgk.smgk_attention(q, k, p[0], v, p[1], variance=p[2], return_lse=True, **seen)

    for is_causal, window in ((False, None), (True, None), (True, 1), (True, 4), (True, 17), (True, 10**3)):
        leaves = [each.clone().requires_grad_() for each in inputs]
        query, key, value, shift, prior, variance = leaves
        seen: dict[str, Any] = {"is_causal": is_causal, "window": window}
        expected: Tensor = mgk.smgk_attention(query, key, shift, value, prior, variance=variance, **seen, **masks)
        wanted = torch.autograd.grad(expected, leaves, upstream)

        own = [shard_sequence(each, mesh, 2).requires_grad_() for each in inputs[:3]]
        shared = [each.clone().requires_grad_() for each in inputs[3:]]
        output = ring_attention(attend, own[0], own[1], own[2], *shared, ring=ring, **seen, **own_masks)
        close("output", unshard_sequence(output, mesh, 2), expected.detach())
        found = torch.autograd.grad(output, own + shared, shard_sequence(upstream, mesh, 2))
        for name, grad, wish in zip(("query", "key", "value"), found, wanted, strict=False):
            close(f"gradient of {name} for window {window}", unshard_sequence(grad, mesh, 2), wish)
        for name, grad, wish in zip(("shift", "prior", "variance"), found[3:], wanted[3:], strict=True):
            dist.all_reduce(grad)
            close(f"gradient of {name} for window {window}", grad, wish)


@on(4)
def check_ring_attention_keeps_the_memory_of_its_own_positions() -> None:
    ring, kept = Ring(mesh_of(4)), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    x = torch.randn(1, 2, 16, 8, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: Any, queries: Any, causal: bool, window: int | None) -> Any:
        return mgk.mgk_attention(q, k[:, :, None], v, is_causal=causal, window=window, return_lse=True)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ring_attention(attend, x, x, x, ring=ring, is_causal=True)
    assert sum(kept) == 4 * x.numel() + x[..., 0].numel()  # queries, keys, values, output and lse


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


@on(4)
def check_wrong_use_names_the_argument() -> None:
    mesh, other = mesh_of(2, 2, names=("data", "heads")), mesh_of(4)
    query = torch.randn(2, 4, 6, 3)

    def attend(q: Any, k: Any, v: Any = None, **options: Any) -> Tensor:
        return mgk.linear_attention(q, k, k if v is None else v, **options)

    def put(placements: Placements, on: DeviceMesh = mesh, value: Tensor = query) -> Any:
        return distribute_tensor(value, on, placements)

    whole, mask = put((Replicate(), Replicate())), torch.ones(2, 6, dtype=torch.bool)
    attention = language_model().encoder.stack.layers[0].attention
    em = language_model(prior="em")
    classifier = build(ClassifierConfig(vocabulary=5))
    wrong = {
        "query: expected Replicate(), Shard(0) (samples), Shard(1) (heads) along mesh dimension 'heads', got Shard":
            (attend, put((Shard(0), Shard(2))), whole),
        "key: expected Replicate()": (attend, whole, DTensor.from_local(query, mesh, (Partial(), Replicate()))),
        "value: expected to be sharded over samples along mesh dimension 'data', as query is, got heads":
            (attend, put((Shard(0), Replicate())), put((Shard(1), Replicate()))),
        "key: expected a DTensor, as other arguments are": (attend, whole, query, whole),
        "key: expected a DTensor on the mesh": (attend, whole, put((Replicate(),), other), whole),
        "query: expected a number of heads that is a multiple of 4, the size of mesh dimension 'data' and 'heads'":
            (attend, *[put((Shard(1), Shard(1)), value=torch.randn(2, 6, 6, 3))] * 2),
        "query: expected a plain tensor, for which prior_statistics is defined":
            (mgk.prior_statistics, whole, whole[:, :, None]),
        "num_heads: expected a multiple of the 4 processes of the tensor-parallel mesh, got 6":
            (tensor_parallel, language_model(heads=6), other),
        "mesh: expected a mesh of one dimension": (tensor_parallel, em, mesh),
        "data_mesh: expected the mesh": (tensor_parallel, em, mesh["heads"]),
        "model: expected a module with mgk.nn.MixtureAttention": (tensor_parallel, nn.Linear(2, 2), other),
        "tensor: expected a multiple of 2 x 4 processes along dimension 1": (shard_sequence, torch.zeros(2, 12), other),
        "mesh: expected one dimension": (context_parallel, attention, mesh),
        "model: expected prior and means other than 'em'": (context_parallel, em, other),
        "model: expected a LanguageModel": (context_parallel, classifier, other),
    }  # fmt: skip
    for message, call in wrong.items():
        assert message in error_of(*call), (message, error_of(*call))
    masked = put((Shard(0), Replicate()))
    assert "key_mask: expected a DTensor" in error_of(attend, masked, masked, key_mask=mask)

    ring = context_parallel(language_model(attention_dropout=0.1), other).train()
    attention, x = ring.encoder.stack.layers[0].attention, torch.randn(2, 6, 8, dtype=torch.float64)
    assert "dropout: expected 0 in context parallelism" in error_of(attention, x)
    attention.eval()
    refused: dict[str, Any] = {"key": x + 1, "need_weights": True, "cache": attention.new_cache(2)}
    for name, value in refused.items():
        assert f"{name}: expected" in error_of(attention, x, **{name: value})
    assert "query: expected an even number" in error_of(attention, x[:, :5])
    tokens = torch.zeros(2, 6, dtype=torch.long)
    assert "positions: expected those" in error_of(ring, tokens, mask)
    sharded = tensor_parallel(language_model(), other)
    assert "tokens: expected numbers from 0 to 36, got 0 to 37" in error_of(sharded, torch.tensor([[0, 37]]))
    assert "need_weights: expected False" in error_of(sharded.encoder.stack.layers[0].attention, x, need_weights=True)
