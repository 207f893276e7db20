"""The compiled library, if there is one, and the layout of a call."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any

from mgk.ops.native.build import library_path

# `Call` of call.h: pointers, strides and other integers, and two numbers, of 8 bytes each.
CALL = struct.Struct("@19P47q2d")
HOW = "install mgk again where there is a C++ compiler, or run `python -m mgk.ops.native.build`"


class Missing(str):
    """Why there is no library."""


@cache
def load() -> Any:
    """The library as ctypes has it, or `Missing`."""
    path = library_path()
    if not path.exists():
        old = any(path.parent.glob("_native_*"))
        return Missing(f"it is {'of other sources than these' if old else 'not built'}: {HOW}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return Missing(f"it cannot be loaded ({error}): {HOW}")
    for name in ("mgk_forward", "mgk_backward"):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    library.mgk_call_bytes.restype = ctypes.c_int64
    library.mgk_instruction_set.restype = ctypes.c_char_p
    if library.mgk_call_bytes() != CALL.size:
        return Missing(f"its calls have {library.mgk_call_bytes()} bytes and not {CALL.size}: {HOW}")
    return library


def reason_missing() -> str:
    """Why the library cannot be used; empty where it can."""
    found = load()
    return str(found) if isinstance(found, Missing) else ""
