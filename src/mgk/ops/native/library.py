"""The compiled library, if there is one, and the layout of a call."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

from mgk.ops.native.build import library_path

# `Call` of call.h: pointers, strides and other integers, and two numbers, of 8 bytes each.
CALL = struct.Struct("@19P47q2d")
ADVICE = "install mgk again where there is a C++ compiler, or run `python -m mgk.ops.native.build`"


def load(path: Path) -> tuple[Any, str]:
    """The library as ctypes has it, or None and why it cannot be used."""
    if not path.exists():
        stale = any(path.parent.glob("_native_*"))
        return None, f"the library is {'older than its sources' if stale else 'not built'}: {ADVICE}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the library cannot be loaded ({error}): {ADVICE}"
    library.mgk_call_bytes.restype = ctypes.c_int64
    if library.mgk_call_bytes() != CALL.size:
        return None, f"the library reads calls of {library.mgk_call_bytes()} bytes, not {CALL.size}: {ADVICE}"
    for function in (library.mgk_forward, library.mgk_backward):
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    library.mgk_instruction_set.restype = ctypes.c_char_p
    return library, ""


LIBRARY, MISSING = load(library_path())


def instruction_set() -> str:
    """What the kernels were chosen for: avx512, avx2 or portable. MGK_NATIVE_ISA asks for one of them."""
    return "" if LIBRARY is None else LIBRARY.mgk_instruction_set().decode()
