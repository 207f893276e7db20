"""Attention of DTensors: every process computes its samples and its heads, without communication.

Samples and heads do not depend on each other. So a public function of `mgk.ops` that gets DTensors calls itself with
the local parts (`torch.distributed.tensor.experimental.local_map`), and this one rule serves all implementations,
forward and backward. An operator below the public function could not be sharded as well: most fold samples and heads
into one axis.

Along each dimension of the device mesh the call is sharded over samples, over heads, or not at all, as its DTensors
are. Tensors that are replicated where others are sharded are cut, or are used whole if they have no such axis. The
gradient of the latter is a sum over the processes, DTensor's `Partial`.

B batch, H query heads, G heads of keys and values, M components.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import wraps
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", Tensor, Tensor | None)

PLAIN = {Tensor, nn.Parameter, NoneType, bool, int, float, str}


class Axes(NamedTuple):
    """Which axis of a tensor counts samples, and which heads."""

    samples: int | None
    heads: int | None


ARGUMENTS = {
    **dict.fromkeys(("query", "key", "value"), Axes(0, 1)),
    **dict.fromkeys(("shift", "log_prior", "variance"), Axes(None, 0)),
    **dict.fromkeys(("key_mask", "query_mask"), Axes(0, None)),
    **dict.fromkeys(("cu_seq_q", "cu_seq_k", "seqused_k", "block_table"), Axes(None, None)),
}
PACKED = ARGUMENTS | dict.fromkeys(("query", "key", "value"), Axes(None, 1))
OUTPUT = Axes(0, 1)


def is_dtensor(value: object) -> bool:
    """Whether it is a DTensor. It does not import `torch.distributed.tensor`, which takes a second."""
    return type(value) not in PLAIN and isinstance(value, Tensor) and hasattr(value, "device_mesh")


def local_part(tensor: T) -> T:
    """The part of a DTensor that this process holds; any other tensor, or None, itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined, union-attr, no-any-return]


def accepts_dtensors(
    *outputs: Axes, arguments: dict[str, Axes] = ARGUMENTS
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The decorator of a public function.

    Args:
        outputs: axes of its results, of which the second is lse. Without any, DTensors are an error.
        arguments: axes of its tensors.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if PLAIN.issuperset(map(type, args)) and PLAIN.issuperset(map(type, kwargs.values())):
                return function(*args, **kwargs)
            if not any(map(is_dtensor, (*args, *kwargs.values()))):
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return _call_local(function, bound.arguments, arguments, outputs)  # type: ignore[no-any-return]

        return call

    return decorate


def _call_local(
    function: Callable[..., Any], arguments: dict[str, Any], table: dict[str, Axes], outputs: tuple[Axes, ...]
) -> Any:
    """Call `function` with the local parts of its DTensors, and return DTensors."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import local_map

    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    sharded = {name: value for name, value in tensors.items() if is_dtensor(value)}
    if not outputs:
        name = next(iter(sharded))
        raise TypeError(f"{name}: expected a plain tensor, for which {function.__name__} is defined, got a DTensor")
    if "block_table" in tensors:
        raise TypeError("block_table: expected None with DTensors, of which each process has its part, got a tensor")
    mesh: DeviceMesh = next(iter(sharded.values())).device_mesh  # type: ignore[attr-defined]
    for name, value in sharded.items():
        if value.device_mesh != mesh:  # type: ignore[attr-defined]
            raise ValueError(f"{name}: expected a DTensor on the mesh of the others, {mesh}, got {value.device_mesh}")  # type: ignore[attr-defined]
    along = [_sharded_axis(sharded, table, mesh, number) for number in range(mesh.ndim)]
    axes = {name: table[name] for name in tensors}
    if tensors["key"].shape[1] == 1 < tensors["query"].shape[1]:  # heads are axis 1, packed or not
        # The one head of multi-query attention is used by all query heads.
        axes |= {name: axes[name]._replace(heads=None) for name in ("key", "value") if name in axes}
    for name, value in tensors.items():
        _check_tensor(name, value, axes[name], mesh, along)

    def placements(each: Axes, otherwise: Placement) -> tuple[Placement, ...]:
        """Where it has the sharded axis, `Shard`; where it has not, `otherwise`."""
        found = ((axis, None if axis is None else getattr(each, axis)) for axis in along)
        return tuple(
            Replicate() if axis is None else otherwise if place is None else Shard(place) for axis, place in found
        )

    def with_locals(*parts: Tensor) -> Any:
        return function(**arguments | dict(zip(tensors, parts, strict=True)))

    number = 2 if arguments.get("return_lse") else 1
    return local_map(
        with_locals,
        out_placements=tuple(placements(each, Partial()) for each in outputs[:number]),
        in_placements=tuple(placements(each, Replicate()) for each in axes.values()),
        in_grad_placements=tuple(placements(each, Partial()) for each in axes.values()),
        device_mesh=mesh,
        redistribute_inputs=True,
    )(*tensors.values())


def _sharded_axis(sharded: dict[str, Tensor], table: dict[str, Axes], mesh: DeviceMesh, number: int) -> str | None:
    """The axis that dimension `number` of the mesh divides: "samples", "heads" or None."""
    from torch.distributed.tensor import Replicate, Shard

    found: dict[str, str] = {}
    for name, value in sharded.items():
        placement = value.placements[number]  # type: ignore[attr-defined]
        if placement == Replicate():
            continue
        places = {axis: place for axis, place in table[name]._asdict().items() if place is not None}
        at = placement.dim % value.dim() if type(placement) is Shard else None
        axis = next((axis for axis, place in places.items() if place == at), None)
        if axis is None:
            allowed = "".join(f", Shard({place}) ({axis})" for axis, place in places.items())
            raise ValueError(
                f"{name}: expected Replicate(){allowed} along mesh dimension {_name(mesh, number)}, got {placement!r}; "
                f"see {name}.redistribute(placements=...)"
            )
        found[axis] = name
    if len(found) > 1:
        raise ValueError(
            f"{found['heads']}: expected to be sharded over samples along mesh dimension {_name(mesh, number)}, "
            f"as {found['samples']} is, got heads"
        )
    return next(iter(found), None)


def _check_tensor(name: str, value: Tensor, axes: Axes, mesh: DeviceMesh, along: list[str | None]) -> None:
    """Require a DTensor whose sharded axes are divided evenly, or a plain tensor that all processes use whole."""
    if not is_dtensor(value):
        if value.is_floating_point() or any(axis and getattr(axes, axis) is not None for axis in along):
            raise TypeError(f"{name}: expected a DTensor, as other arguments are, got a plain tensor")
        return
    for axis in {axis for axis in along if axis}:
        place, dimensions = getattr(axes, axis), [number for number, each in enumerate(along) if each == axis]
        parts = math.prod(mesh.size(number) for number in dimensions)
        if place is not None and value.shape[place] % parts:
            names = " and ".join(_name(mesh, number) for number in dimensions)
            raise ValueError(
                f"{name}: expected a number of {axis} that is a multiple of {parts}, the size of mesh dimension "
                f"{names}, got {value.shape[place]}"
            )


def _name(mesh: DeviceMesh, number: int) -> str:
    return repr(mesh.mesh_dim_names[number]) if mesh.mesh_dim_names else str(number)
