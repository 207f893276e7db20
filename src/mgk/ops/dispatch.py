"""Decide which implementation, kernels and tile sizes a call gets. No other module decides.

`plan` is a pure function of a `Call`, which describes a call by its shapes, types, features, device and versions. It
needs neither a GPU nor Triton, so that the plan for any machine can be tested and printed (`mgk bench --plan`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from mgk.ops.tiles import HOPPER, Shape, largest_tile, shared_memory
from mgk.ops.tiles import Tile as Tile
from mgk.ops.tiles import block_width as block_width

IMPLEMENTATIONS = ("auto", "reference", "blockwise", "native", "triton")
LINEAR_IMPLEMENTATIONS = ("auto", "reference", "blockwise", "triton")  # of linear attention
TRITON_DTYPES = ("bfloat16", "float16", "float32")
TRITON_WIDTH = 256
NATIVE_DTYPES = ("float32", "bfloat16", "float16", "float64")
NATIVE_WIDTH = 256
MAX_DECODE_QUERIES = 16
SHORT = 256  # the longest sequence that one program handles alone
SUMS = 8  # columns of the smallest matrix product: the components whose sums it can hold
GLUON_VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))  # of Triton; 3.6 and 3.9 ran on a GPU, 3.7 and 3.8 compile
LONG_SCAN = 1024  # positions above which "auto" prefers fla-core, which scans all chunks at once; not measured
BFLOAT16 = (8, 0)  # the first compute capability with it
HOPPER_BLOCK = 128

PASSES = ("forward", "query", "key")
# Heads that a launch handles. Overflow is detected per head: most calls have no such head.
ALL, FITTING, OVERFLOWING = 0, 1, 2
# How a launch computes: factored exponentials (FAST), right for all numbers (FALLBACK), and the same for a hard E-step.
FAST, FALLBACK, HARD, FAST_HARD = 0, 1, 2, 3


class Launch(NamedTuple):
    """One launch of a pass."""

    kernels: str  # "generic", "short", "hopper" or "hopper short"
    heads: int = ALL
    path: int = FAST
    fixed: bool = False  # the row maximum is bounded beforehand instead of updated
    narrow: bool = False  # weights are mixed in bfloat16, and summed by matrix products
    as_vectors: bool = False  # hands its row statistics to the key pass as vectors, which the Hopper kernel reads
    tile: Tile | None = None  # None: the Hopper kernels have tiles of their own


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a decision depends on.

    `gluon`: Triton can compile the Hopper kernels. `aligned`: the copy engine can read every tensor in tiles, as
    addresses and strides are multiples of 16 bytes.
    """

    family: str  # "shifted" or "projected"
    dtype: str = "bfloat16"
    device: str = "cuda"
    capability: tuple[int, int] | None = None  # of an NVIDIA GPU
    hip: bool = False  # an AMD GPU
    triton: bool = True
    gluon: bool = False
    queries: int
    keys: int
    width: int
    value_width: int
    components: int = 2
    hard: bool = False
    masked: bool = False
    packed: bool = False
    group: int = 1  # query heads that read the same keys and values
    window: int = 0  # of a causal mask; 0: none
    lse: bool = False  # the log of the row sums is returned
    dropout: bool = False
    variances: bool = False  # one variance per component
    shared: bool = False  # such variances with shifted keys, of the family "projected"
    aligned: bool = True
    needs_grad: bool = True

    @property
    def block_width(self) -> int:
        return max(block_width(self.width), block_width(self.value_width))

    @property
    def shape(self) -> Shape:
        """What the size of a tile depends on, where it is not tuned."""
        return shape_of(self.family, self.dtype, self.block_width, self.components, self.capability, self.hip)

    @property
    def narrow(self) -> bool:
        return is_narrow(self.dtype, self.components)

    @property
    def only_generic(self) -> tuple[str, ...]:
        """Features of the call that only the generic kernels have."""
        features = {"grouped queries": self.group > 1, "a window": self.window > 0, "lse": self.lse}
        return tuple(name for name, asked in features.items() if asked)

    @property
    def short(self) -> bool:
        """Whether one program handles a head: few tiles, and sums over a key tile that fit into registers."""
        few = not (self.packed or self.only_generic) and 0 < max(self.queries, self.keys) <= SHORT
        small = self.block_width <= 32 and self.components * self.block_width <= 64
        return self.family == "shifted" and few and small and self.dtype == "bfloat16"

    @property
    def long_on_hopper(self) -> bool:
        """Whether the Hopper kernels for long sequences could take the call, if they have its width and type."""
        return self.plain_on_hopper and self.aligned and min(self.queries, self.keys) >= HOPPER_BLOCK

    @property
    def plain_on_hopper(self) -> bool:
        plain = not (self.masked or self.packed or self.dropout or self.variances or self.only_generic)
        return self.gluon and self.capability == HOPPER and plain

    def on_hopper(self, widths: tuple[int, ...]) -> bool:
        """Whether a Hopper kernel for two components and these head widths takes the call."""
        fits = self.dtype == "bfloat16" and self.components == 2 and self.width == self.value_width
        return self.plain_on_hopper and fits and self.width in widths

    def wide(self, least: int) -> bool:
        """Whether the Hopper kernels for long sequences take the call, with heads at least so wide."""
        return self.long_on_hopper and self.on_hopper(tuple(width for width in (32, 64, 128) if width >= least))

    def projects_on_hopper(self, least: int) -> bool:
        """Whether the Hopper kernels for projected keys take the call, with blocks at least so wide."""
        block = self.block_width
        full = replace(self, dtype="bfloat16", width=block, value_width=block)  # zeros fill the blocks
        return self.dtype != "float32" and full.wide(least)

    def shares_on_hopper(self) -> bool:
        """Whether the Hopper kernels for shifted keys with a variance per component take the call."""
        fits = self.shared and not self.hard and self.dtype == "bfloat16"
        return fits and replace(self, variances=False).projects_on_hopper(64)


@dataclass(frozen=True)
class Plan:
    """What runs, and why. A short call has one backward kernel, listed in `query`."""

    implementation: str
    reason: str
    decode: bool = False
    short: bool = False
    forward: tuple[Launch, ...] = ()
    query: tuple[Launch, ...] = ()
    key: tuple[Launch, ...] = ()
    query_tile: Tile | None = None  # of the generic kernels, whether they are launched or not
    key_tile: Tile | None = None


def linear_width(capability: tuple[int, int] | None, hip: bool = False) -> int:
    """How wide heads of linear attention may be: a program keeps the sums of a head, D x Dv numbers."""
    return 128 if shared_memory(capability, hip) > 128 * 1024 else 64


def is_narrow(dtype: str, components: int) -> bool:
    """Whether weights can be mixed in bfloat16 and summed by matrix products."""
    return dtype == "bfloat16" and components <= SUMS


def lacks(dtype: str, capability: tuple[int, int] | None) -> str:
    """Why a GPU with this compute capability has no kernels for a dtype; empty where it has them."""
    if dtype == "bfloat16" and capability is not None and capability < BFLOAT16:
        return f"compute capability {capability[0]}.{capability[1]} has no bfloat16, which needs 8.0"
    return ""


def shape_of(
    family: str, dtype: str, block: int, components: int, capability: tuple[int, int] | None, hip: bool
) -> Shape:
    keys, factors = (components, 1) if family == "projected" else (1, components)
    return Shape(block, keys, factors, dtype == "float32", capability, hip)


def no_tile(family: str, dtype: str, width: int, components: int, capability: tuple[int, int] | None, hip: bool) -> str:
    """Why no tile of the Triton kernels fits into the shared memory of a GPU; empty where one does."""
    if width > TRITON_WIDTH or dtype not in TRITON_DTYPES or (capability == HOPPER and dtype != "float32"):
        return ""
    shape = shape_of(family, dtype, block_width(width), components, capability, hip)
    try:
        for kind in PASSES:
            largest_tile(kind, shape)
    except ValueError as error:
        return str(error).removeprefix("query: ").split(":")[0]
    return ""


def lacks_native(dtype: str, width: int) -> str:
    """Why there are no native kernels for a call on the CPU; empty where there are."""
    if dtype not in NATIVE_DTYPES:
        return f"no native kernels for {dtype}"
    return f"no native kernels for heads wider than {NATIVE_WIDTH}" if width > NATIVE_WIDTH else ""


def implementation(
    impl: str, device: str, dtype: str, width: int, triton: bool, capability: tuple[int, int] | None = None,
    no_native: str = "", without_tile: str = "",
) -> tuple[str, str]:  # fmt: skip
    """The implementation that `impl` stands for, and the reason. An implementation that is named is never replaced.

    `no_native` says why the library of the native kernels cannot be used; it is empty where it can. `without_tile` is
    what `no_tile` says.
    """
    if impl != "auto":
        return impl, "asked for by name"
    if device == "cpu":
        reason = no_native or lacks_native(dtype, width)
        return ("blockwise", reason) if reason else ("native", "CPU tensors")
    if device != "cuda":
        return "reference", f"no kernels for device {device}"
    if not triton:
        return "reference", "Triton is not installed"
    if dtype not in TRITON_DTYPES:
        return "reference", f"no Triton kernels for {dtype}"
    if width > TRITON_WIDTH:
        return "reference", f"no Triton kernels for heads wider than {TRITON_WIDTH}"
    if reason := lacks(dtype, capability) or without_tile:
        return "reference", reason
    return "triton", "CUDA tensors"


def takes_packed(
    impl: str, device: str, dtype: str, width: int, triton: bool, capability: tuple[int, int] | None = None
) -> bool:
    """Whether the kernels read packed sequences as they are, for heads of this width."""
    fits = triton and dtype in TRITON_DTYPES and width <= TRITON_WIDTH and not lacks(dtype, capability)
    return fits and (impl == "triton" or (impl == "auto" and device == "cuda"))


def linear_path(impl: str, device: str, kernels: bool, fla: bool, length: int) -> str | None:
    """What computes linear attention on a GPU: "kernels" (ours), "fla" (fla-core), or None.

    `kernels` and `fla` say which of the two can; fla-core is preferred for long causal sequences.
    """
    if impl != "triton" and (impl != "auto" or device != "cuda"):
        return None
    if kernels and not (fla and impl == "auto" and length > LONG_SCAN):
        return "kernels"
    return "fla" if fla else None


def decodes(queries: int, needs_grad: bool, dropout: bool, query_mask: bool, packed: bool) -> bool:
    """Whether the decoding kernel, which splits the keys between programs, takes the call."""
    return queries <= MAX_DECODE_QUERIES and not (needs_grad or dropout or query_mask or packed)


@lru_cache(maxsize=1024)
def plan(call: Call, impl: str = "auto") -> Plan:
    """Everything that is decided about a call."""
    width = max(call.width, call.value_width)
    decode = decodes(call.queries, call.needs_grad, call.dropout, False, call.packed)
    without_tile = ""
    if not decode:
        without_tile = no_tile(call.family, call.dtype, width, call.components, call.capability, call.hip)
    name, reason = implementation(
        impl, call.device, call.dtype, width, call.triton, call.capability, without_tile=without_tile
    )
    if name != "triton":
        return Plan(name, reason)
    if call.only_generic:
        reason += f"; generic kernels for {' and '.join(call.only_generic)}"
    if decode:
        return Plan(name, reason, decode=True)
    if call.short:
        return Plan(name, reason, short=True, forward=short(call, "forward"), query=short(call, "backward"))
    passes = shifted(call) if call.family == "shifted" else projected(call)
    forward, query, key = (tuple(tiled(call, kind, each) for each in passes[kind]) for kind in PASSES)
    tiles = [choose_tile(call.family, kind, call) for kind in PASSES[1:]]
    return Plan(name, reason, False, False, forward, query, key, *tiles)


def short(call: Call, kind: str) -> tuple[Launch, ...]:
    """One program per head. On Hopper a kernel of its own takes the heads that fit, and leaves the others."""
    tile = choose_tile("shifted", f"short {kind}", call)
    if call.on_hopper((16, 32)) and min(call.queries, call.keys) > 0:
        return Launch("hopper short", FITTING), Launch("short", OVERFLOWING, tile=tile)
    return (Launch("short", ALL, tile=tile),)


def shifted(call: Call) -> dict[str, tuple[Launch, ...]]:
    fixed = call.dtype != "float16"  # which has too few exponents for a maximum that is fixed beforehand
    rest = Launch("generic", OVERFLOWING, HARD if call.hard else FALLBACK)
    path = (FAST_HARD if call.narrow else HARD) if call.hard else FAST
    forward: tuple[Launch, ...] = (Launch("generic", FITTING, path, fixed, call.narrow), rest)
    if call.hard and not fixed:
        forward = (rest._replace(heads=ALL),)
    if call.hard and not (call.narrow and call.components == 2):
        backward: tuple[Launch, ...] = (Launch("generic", ALL, HARD, narrow=call.narrow),)
    else:
        fast = Launch("generic", FITTING, FAST_HARD if call.hard else FAST, narrow=call.narrow)
        backward = (fast, rest._replace(narrow=call.hard))
    query = key = backward
    soft_half = call.dtype == "float16" and call.components <= SUMS and not call.hard
    widths: tuple[int, ...] = (64, 128) if soft_half or call.narrow else ()
    if call.narrow and not call.hard and call.components <= 4:
        widths += (256,)
    if call.long_on_hopper and call.block_width in widths:
        forward = on_hopper(forward)
        if backward[0].path != HARD:
            query = key = on_hopper(backward)
    elif call.long_on_hopper and call.narrow and call.block_width == 32 and call.components == 2:
        key = on_hopper(backward)  # the other passes are faster in Triton
        query = (backward[0]._replace(as_vectors=True), *backward[1:])
    return {"forward": forward, "query": query, "key": key}


def projected(call: Call) -> dict[str, tuple[Launch, ...]]:
    path = HARD if call.hard else FALLBACK
    fixed = call.dtype != "float16"
    forward: tuple[Launch, ...] = (Launch("generic", ALL, path),)
    if fixed:
        fast = HARD if call.hard else FAST
        forward = (Launch("generic", FITTING, fast, True, call.narrow), Launch("generic", OVERFLOWING, path))
    backward: tuple[Launch, ...] = (
        Launch("generic", ALL, path, narrow=call.hard and call.narrow and not call.variances),
    )
    if call.narrow and not call.hard and (not call.variances or call.shares_on_hopper()):
        backward = (Launch("generic", FITTING, FAST, narrow=True), Launch("generic", OVERFLOWING, path))
    if not fixed:  # sums of the heads that the Hopper kernels leave to the fallback path are not numbers
        split = (Launch("generic", FITTING, path), Launch("generic", OVERFLOWING, path))
        forward = split if call.projects_on_hopper(32) else forward
        backward = split if call.projects_on_hopper(64) and not call.hard else backward
    if call.hard and call.projects_on_hopper(32):  # the two kinds of kernels round exponents in different ways
        backward = (backward[0]._replace(heads=FITTING), backward[0]._replace(heads=OVERFLOWING))
    if call.projects_on_hopper(32) or call.shares_on_hopper():
        forward = on_hopper(forward)
    if call.projects_on_hopper(32 if call.hard else 64) or call.shares_on_hopper():
        backward = on_hopper(backward)
    return {"forward": forward, "query": backward, "key": backward}


def on_hopper(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """The same with a Hopper kernel for the heads of the first launch."""
    return (launches[0]._replace(kernels="hopper"), *launches[1:])


def tiled(call: Call, kind: str, launch: Launch) -> Launch:
    """With a tile. Launches for heads that would overflow hold more numbers of a pair: they loop over smaller tiles."""
    if launch.kernels == "hopper":
        return launch
    tile = choose_tile(call.family, kind, call)
    if launch.heads == OVERFLOWING:
        name = "queries" if kind == "key" else "keys"
        tile = tile._replace(**{name: max(16, getattr(tile, name) // 2)})
    return launch._replace(tile=tile)


# (family, pass, block width): tile, for half precision; found with `python -m benchmarks.tune` on an H200
TILES: dict[tuple[str, str, int], Tile] = {
    ("shifted", "forward", 16): Tile(64, 64, 4, 3),
    ("shifted", "forward", 32): Tile(128, 64, 4, 3, 168),
    ("shifted", "forward", 64): Tile(128, 64, 4, 3),
    ("shifted", "forward", 128): Tile(64, 64, 4, 3),
    ("shifted", "query", 16): Tile(128, 64, 4, 3),
    ("shifted", "query", 32): Tile(128, 64, 4, 3),
    ("shifted", "query", 64): Tile(64, 64, 4, 3),
    ("shifted", "query", 128): Tile(64, 64, 4, 2),
    ("shifted", "key", 16): Tile(32, 64, 4, 3),
    ("shifted", "key", 32): Tile(64, 64, 4, 3, 168),
    ("shifted", "key", 64): Tile(64, 64, 4, 3),
    ("shifted", "key", 128): Tile(32, 64, 8, 3),
    ("shifted", "short forward", 16): Tile(64, 64, 4, 1, 168),
    ("shifted", "short forward", 32): Tile(64, 64, 4, 3),
    ("shifted", "short backward", 16): Tile(32, 64, 4, 1, 168),
    ("shifted", "short backward", 32): Tile(64, 64, 4, 2),
    ("projected", "forward", 16): Tile(64, 64, 4, 3),
    ("projected", "forward", 32): Tile(128, 64, 4, 3),
    ("projected", "forward", 64): Tile(128, 64, 4, 3),
    ("projected", "forward", 128): Tile(128, 64, 8, 3),
    ("projected", "query", 16): Tile(64, 64, 4, 3),
    ("projected", "query", 32): Tile(64, 64, 4, 3),
    ("projected", "query", 64): Tile(64, 64, 4, 3),
    ("projected", "query", 128): Tile(128, 64, 8, 2),
    ("projected", "key", 16): Tile(32, 64, 4, 3),
    ("projected", "key", 32): Tile(64, 64, 4, 3, 168),
    ("projected", "key", 64): Tile(64, 64, 4, 3),
    ("projected", "key", 128): Tile(32, 64, 8, 2),
}
# Tiles that replace the table's while a sweep tries them, by family and pass. Clear `plan`'s cache after a change.
override: dict[tuple[str, str], Tile] = {}


def choose_tile(family: str, kind: str, call: Call) -> Tile:
    """From the table on the GPU it was found on, else the largest tile that fits into registers and shared memory."""
    if (family, kind) in override:
        return override[family, kind]
    tuned = call.capability in (HOPPER, None) and not call.hip and call.dtype != "float32"
    if kind == "short backward" and call.block_width == 32 and not tuned:
        return Tile(32, 64, 4, 1, 255)
    if kind.startswith("short") or (tuned and call.block_width <= 128 and call.shape.keys <= 2):
        return TILES[family, kind, call.block_width]
    if tuned and call.block_width > 128:  # 1.7 times as fast as the estimate below, and the next rule 2.4
        return Tile(64, 32, 8, 2) if call.components <= 2 else Tile(32, 32, 4, 1)
    if tuned:
        return Tile(32, 64, 4, 3) if kind == "key" else Tile(64, 32, 4, 2)
    return largest_tile(kind, call.shape)


def describe(call: Call, impl: str = "auto") -> list[tuple[str, str]]:
    """The plan as text: a pass and what it launches, line by line."""
    chosen = plan(call, impl)
    lines = [("implementation", f"{chosen.implementation} ({chosen.reason})")]
    if chosen.decode:
        lines.append(("forward", "decoding kernel, which splits the keys between programs"))
    passes = {"forward": chosen.forward, "backward": chosen.query} if chosen.short else {
        "forward": chosen.forward, "dq": chosen.query, "dk, dv": chosen.key
    }  # fmt: skip
    for name, launches in passes.items():
        lines += [(name, describe_launch(each)) for each in launches]
    return lines


def describe_launch(launch: Launch) -> str:
    heads = {ALL: "all heads", FITTING: "heads on the fast path", OVERFLOWING: "heads that would overflow, if any"}
    text = f"{launch.kernels} kernel, {heads[launch.heads]}"
    if launch.tile is not None:
        tile = launch.tile
        text += f", tile {tile.queries} x {tile.keys}, {tile.warps} warps, {tile.stages} stages"
    return text
