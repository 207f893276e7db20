"""Embed arrays and JSON in the HTML page.

An array becomes a block: a `<script type="text/plain">`, which a browser neither runs nor shows. It holds 8-, 16- or
32-bit numbers in base64, deflated if that makes them smaller. JSON is written with every `<` escaped, so that no text
can end the element that contains it.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from mgk.inspect.heads import Factors

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array = dict[str, Any]  # description of an array for the page: its block, type and shape
DECADES = {"u8": 6, "u16": 9}  # below the largest number; smaller numbers become 0


class Blocks:
    """The arrays of one page, as HTML elements."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def add(self, data: bytes, kind: str, shape: tuple[int, ...], **facts: Any) -> Array:
        """Add the bytes of an array and return its description."""
        deflated = zlib.compress(data, 9)
        small = len(deflated) < 0.95 * len(data)  # otherwise inflating is not worth the time
        index = len(self.elements)
        text = base64.b64encode(deflated if small else data).decode()
        self.elements.append(
            f'<script type="text/plain" id="block-{index}"{" data-deflated" if small else ""}>{text}</script>'
        )
        return {"block": index, "type": kind, "shape": list(shape), **facts}

    def floats(self, values: NDArray[np.floating]) -> Array:
        """Add an array in 32 bits."""
        values = np.ascontiguousarray(values, dtype="<f4")
        return self.add(values.tobytes(), "f32", values.shape)

    def steps(self, values: NDArray[np.floating]) -> Array:
        """Add an array as 16-bit integers; the step of each column (last axis) comes first in the block."""
        steps, codes = quantise(values)
        return self.add(steps.tobytes() + codes.tobytes(), "i16", values.shape)

    def logs(self, values: NDArray[np.floating], kind: str) -> Array:
        """Add an array as logarithms in 8 or 16 bits (`kind` "u8" or "u16"): one relative error, and 0 stays 0."""
        largest = float(values.max(initial=0)) or 1.0
        levels, span = (254, 65534)[kind == "u16"], DECADES[kind] * np.log(10)
        with np.errstate(divide="ignore"):
            level = np.round(levels * (1 + np.log(values / largest) / span))
        codes = np.where(level >= 0, level + 1, 0).astype("<u1" if kind == "u8" else "<u2")
        return self.add(codes.tobytes(), kind, values.shape, largest=largest, step=span / levels)


def quantise(values: NDArray[np.floating]) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Return steps (F,) and integers (...,F) whose product is `values` to half a step."""
    steps = np.abs(values).max(axis=tuple(range(values.ndim - 1)), initial=0) / 32767
    steps = np.where(steps > 0, steps, 1).astype("<f4")
    return steps, np.round(values / steps).clip(-32767, 32767).astype("<i2")


def fits_16_bits(head: Factors, tolerance: float = 2e-4, sample: int = 64) -> bool:
    """Check on evenly spaced rows whether 16-bit queries and keys give weights to a relative `tolerance`."""
    rows = np.unique(np.linspace(0, head.num_queries - 1, sample).astype(int))
    query, key = head.query.double().numpy()[rows], head.key.double().numpy()
    rounded = [codes * steps.astype(float) for steps, codes in (quantise(query), quantise(key))]
    error = np.abs(query @ key.swapaxes(-1, -2) - rounded[0] @ rounded[1].swapaxes(-1, -2))
    if head.link == "log":
        error = error / np.maximum(query @ key.swapaxes(-1, -2), 1e-30)
    return bool((error * head.scale.abs().max().item()).max(initial=0) < tolerance)


def script_safe(value: object) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # "<" could open or close an element; U+2028 breaks older parsers, and a lone surrogate UTF-8
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in text)
