"""What `benchmarks.cuda` measures: attention problems, and the mixtures that are compared with softmax on each.

B batch, H heads of softmax (a mixture has half), N positions, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mgk.ops.measure import MIXTURES, Case, Method

SOFT = (Method("smgk"), Method("mgk"))
# FLOPs of a direction in units of those of a forward pass, as FlashAttention counts them.
FLOPS = {"forward": 1.0, "backward": 2.5, "train": 3.5, "eager_train": 3.5}


@dataclass(frozen=True)
class Problem(Case):
    """A case with a dtype and features, under which softmax and the mixtures are measured."""

    dtype: str = "bfloat16"
    tf32: bool = False
    dropout: float = 0.0
    padded: bool = False  # half of the positions are padding
    methods: tuple[Method, ...] = SOFT

    @property
    def small(self) -> Problem:
        """A part that can be computed densely, with as many positions beyond whole blocks, without dropout."""
        length = min(self.length, 384 + self.length % 128)
        group = self.heads // (self.kv_heads or self.heads)
        heads = max(4, 2 * group)
        kv_heads = None if self.kv_heads is None else heads // group
        window = None if self.window is None else min(self.window, length // 4)
        return replace(self, batch=1, heads=heads, kv_heads=kv_heads, length=length, window=window, dropout=0.0)

    @property
    def shape(self) -> tuple[int, int, int, int, bool]:
        """B, H, N, D and whether the problem is causal, as the JSON file has them."""
        return self.batch, self.heads, self.length, self.width, self.is_causal

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def lengths(self) -> Tensor:
        """The real positions of each sequence, distributed like those of IMDb's reviews if half is padding: (B,)."""
        if not self.padded:
            return torch.full((self.batch,), self.length)
        generator = torch.Generator().manual_seed(0)
        lengths = torch.empty(self.batch).log_normal_(7.0, 0.65, generator=generator).clamp(100, self.length).long()
        return (lengths * (self.batch * self.length / 2 / lengths.sum())).clamp(max=self.length).long()

    def mask(self, device: str) -> Tensor | None:
        """True for real positions, (B,N), or None if all are."""
        if not self.padded:
            return None
        return (torch.arange(self.length)[None] < self.lengths[:, None]).to(device)

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, in one head of the whole batch."""
        if self.window is not None:
            return self.batch * self.window * (self.length - (self.window - 1) / 2)
        return float(self.lengths.double().square().sum()) / (2 if self.is_causal else 1)

    def tflops(self, direction: str, milliseconds: float) -> float:
        """TFLOP/s of softmax attention with all heads, were it computed in this time."""
        return 4 * self.heads * self.width * self.pairs * FLOPS[direction] / milliseconds / 1e9

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Compute float32 products in TF32 or not, on both sides."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


COMPONENTS = tuple(Method(operator, components=count) for count in (1, 3, 4) for operator in ("smgk", "mgk"))
CASES = (
    Problem("lra-4096", 32, 8, 4096, 32, methods=MIXTURES),
    Problem("wikitext", 96, 8, 256, 16, is_causal=True, methods=MIXTURES),
    Problem("wide", 8, 16, 4096, 64, methods=MIXTURES),
    Problem("long", 4, 16, 8192, 64, is_causal=True, methods=MIXTURES),
    Problem("long-wide", 4, 16, 8192, 128, is_causal=True, methods=MIXTURES),
)
DECODER = (  # what a decoder of today has: grouped queries, and windows
    Problem("grouped", 2, 16, 8192, 128, is_causal=True, kv_heads=4, methods=SOFT),
    Problem("window", 4, 16, 16384, 64, is_causal=True, window=1024, methods=SOFT),
    Problem("no-window", 4, 16, 16384, 64, is_causal=True, methods=SOFT),
)
CACHE = Problem("cache", 16, 16, 32768, 128, kv_heads=4)
VARIATIONS = (
    Problem("components", 8, 16, 4096, 64, methods=(*COMPONENTS, Method("smgk", variances=True))),
    Problem("float16", 8, 16, 4096, 64, dtype="float16"),
    Problem("float32", 8, 16, 2048, 64, dtype="float32"),
    Problem("tf32", 8, 16, 2048, 64, dtype="float32", tf32=True),
    *(Problem(f"d{width}", 4, 16, 8192, width, is_causal=True) for width in (48, 80, 96)),
    *(Problem(f"d{width}", 4, 16, 4096, width, is_causal=True) for width in (192, 256)),
    Problem("ragged", 8, 16, 4001, 64, is_causal=True),
    Problem("even", 8, 16, 4096, 64, is_causal=True),  # what "ragged" is compared with, per pair
    Problem("padded", 32, 8, 4096, 32, padded=True),
    Problem("dropout", 8, 16, 4096, 64, dropout=0.1),
)
