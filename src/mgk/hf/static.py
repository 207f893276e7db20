"""One token after the other into a cache whose room is reserved: steps of one shape, which on a GPU are one graph.

A step reads the whole room, and a mask says how much of it is filled. So no number of a step is one of the host, and a
CUDA graph can hold all its launches, which for one token take the host longer than the GPU. Places that are masked
are not read by the kernels of MGK and sMGK; PyTorch's attention, for softmax, has slower kernels with a mask.

B batch, N positions so far, C room for positions, V tokens.
"""
# mypy: disallow-untyped-calls=False
# torch.cuda is typed in part.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mgk.models import LanguageModel
from mgk.nn import KeyValueCache, StackCache

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class RoomCache(KeyValueCache):
    """A `KeyValueCache` that can also be used whole."""

    def __init__(self, batch_size: int, capacity: int) -> None:
        super().__init__(batch_size, capacity)
        self._place: Int[Tensor, " one"] | None = None

    @property
    def room(self) -> int:
        return self._capacity

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        assert self._key is not None  # there was a prompt
        assert self._value is not None
        return self._key, self._value

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self._place is None:
            return super().append(key, value)
        for buffer, new in zip(self.buffers, (key, value), strict=True):
            buffer.index_copy_(-2, self._place, new)
        return self.buffers

    @contextmanager
    def whole(self, place: Int[Tensor, " one"]) -> Iterator[None]:
        """Within it, one position is put at `place`, and what comes back is the room: the attention sees C keys."""
        length, self._place, self.length = self.length, place, self.room - 1
        try:
            yield
        finally:
            self._place, self.length = None, length


class StaticStep:
    """Logits after one more token. The first step on a GPU runs as it is, the second is captured, all others replayed.

    Args:
        model: whose caches they are.
        layers: caches with a prompt in them.
        graph: capture and replay, on a GPU.
    """

    def __init__(self, model: LanguageModel, layers: list[RoomCache], *, graph: bool = True) -> None:
        self.model, self.layers = model, layers
        self.batch_size, self.room = layers[0].batch_size, layers[0].room
        device = layers[0].buffers[0].device
        self.graph = graph and device.type == "cuda"
        self.tokens = torch.zeros(self.batch_size, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.mask = torch.zeros(self.batch_size, self.room, dtype=torch.bool, device=device)
        self._filled = 0
        self._seen: list[Tensor] = []
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        for layer in layers:
            for buffer in layer.buffers:  # a weight of zero times what memory happens to hold may be NaN
                buffer[..., layer.length :, :].zero_()

    def fits(self, layers: list[RoomCache]) -> bool:
        """Whether it is made for these caches as they are now."""
        now = (layers[0].batch_size, layers[0].room)
        return now == (self.batch_size, self.room) and all(a is b for a, b in zip(layers, self.layers, strict=True))

    def __call__(
        self, tokens: Int[Tensor, "b 1"], mask: Tensor | None, positions: Int[Tensor, "b 1"] | None
    ) -> Float[Tensor, "b 1 v"]:
        """`mask` (B,N) covers the tokens so far and this one, 0 for padding; None is all real. `positions` None counts
        the real tokens.
        """
        length = self.layers[0].length
        if length < self._filled:  # tokens were taken back
            self.mask.zero_()
        self._filled = length + 1
        self.mask[:, : self._filled] = True if mask is None else mask
        self.positions.copy_(self.mask.sum(1, keepdim=True) - 1 if positions is None else positions)
        self.tokens.copy_(tokens)
        self.place.fill_(length)
        logits = self._logits()
        for layer in self.layers:
            layer.length += 1
        return logits

    def _logits(self) -> Tensor:
        buffers = [buffer for layer in self.layers for buffer in layer.buffers]
        same = len(self._seen) == len(buffers) and all(a is b for a, b in zip(buffers, self._seen, strict=True))
        if not same or not self.graph:
            self._seen, self._captured = buffers, None  # beam search puts others in their place, step after step
            return self._compute()
        if self._captured is None:
            graph = torch.cuda.CUDAGraph()
            try:
                # Threads that hand on text or pin memory may go on meanwhile.
                with torch.cuda.device(self.tokens.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._captured = graph, self._compute()
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise RuntimeError(f"a step cannot be captured ({reason}); add disable_compile=True") from error
        self._captured[0].replay()
        return self._captured[1].clone()

    def _compute(self) -> Tensor:
        with torch.no_grad(), ExitStack() as whole:
            for layer in self.layers:
                whole.enter_context(layer.whole(self.place))
            cache = StackCache([*self.layers])
            return self.model(self.tokens, self.mask, positions=self.positions, cache=cache, last=1)  # type: ignore[no-any-return]
