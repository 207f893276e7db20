"""Compile the native kernels: `python -m mgk.ops.native.build`, or from the build hook of the package (hatch_build.py).

    python -m mgk.ops.native.build                     in place
    python -m mgk.ops.native.build FILE [FLAG ...]     to FILE, which MGK_NATIVE_LIBRARY=FILE loads

The library's file name contains a hash of the sources, so a library of other sources is never loaded. This module needs
nothing but Python's standard library: the build hook runs it where PyTorch is not installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
X86 = ("x86_64", "amd64", "x64")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden", "-Wall", "-Wno-psabi")
ISAS = {
    "portable": ("-DVECTOR_BYTES=16",),
    "avx2": ("-DVECTOR_BYTES=32", "-mavx2", "-mfma"),
    "avx512": (
        "-DVECTOR_BYTES=64", "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma",
        "-mprefer-vector-width=512", "-Wno-maybe-uninitialized",  # GCC's own header
    ),
}  # fmt: skip


class BuildError(Exception):
    """Why the library could not be compiled."""


def sources() -> list[Path]:
    return sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")])


def library_path() -> Path:
    """Where the library of these sources is, if it has been compiled. MGK_NATIVE_LIBRARY names another, to test it."""
    if named := os.environ.get("MGK_NATIVE_LIBRARY"):
        return Path(named)
    digest = hashlib.sha256()
    for source in [*sources(), Path(__file__)]:
        digest.update(source.read_bytes())
    return FOLDER / f"_native_{digest.hexdigest()[:16]}{SUFFIX}"


def find_compiler() -> str:
    """The C++ compiler: $CXX, or the first of the usual ones. On Windows, clang: MSVC has no vector types."""
    named = os.environ.get("CXX", "").strip()
    names = [named] if named else ["clang++"] if sys.platform == "win32" else ["g++", "clang++", "c++"]
    for name in names:
        if shutil.which(name.split()[0]):
            return name
    raise BuildError(f"no C++ compiler found (looked for {', '.join(names)}; set CXX to name another)")


def instruction_sets() -> list[str]:
    """What to compile for: all that a user's processor may have; the library chooses when it is loaded."""
    target = os.environ.get("ARCHFLAGS", "") + platform.machine().lower()
    return list(ISAS) if any(name in target for name in X86) and "arm64" not in target else ["portable"]


def commands(compiler: str, flags: Sequence[str], folder: Path, target: Path) -> list[list[str]]:
    """One command for each object file, which may run at the same time, and the one that links them."""
    start = [*compiler.split(), *FLAGS, *flags]
    if sys.platform != "win32":
        start.append("-fPIC")
    if sys.platform == "darwin":
        start += os.environ.get("ARCHFLAGS", "").split()
    sets = instruction_sets()
    found = [
        [*start, *ISAS[name], f"-DISA={name}", "-c", str(FOLDER / "attention.cpp"), "-o", str(folder / f"{name}.o")]
        for name in sets
    ]
    found.append([*start, "-c", str(FOLDER / "library.cpp"), "-o", str(folder / "library.o")])
    objects = [command[-1] for command in found]
    extra = [] if sys.platform == "win32" else ["-pthread"]
    if sys.platform == "linux":
        extra += ["-static-libstdc++", "-static-libgcc"]  # whatever the system has
    return [*found, [*start, "-shared", *objects, "-o", str(target), *extra]]


def build(flags: Sequence[str] = (), target: Path | None = None) -> Path:
    """Compile the library if it is not there, and remove those of other sources."""
    path = library_path() if target is None else target
    if target is None and path.exists():
        return path
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / path.name
        *objects, link = commands(compiler, flags, Path(folder), made)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(run, objects))
        run(link)
        if target is None:
            for old in FOLDER.glob("_native_*"):
                old.unlink()
        moving = path.with_name(f"{path.name}.{os.getpid()}")  # no other process sees half a library
        shutil.copyfile(made, moving)
        moving.replace(path)
    return path


def for_package(wish: str) -> tuple[Path | None, str]:
    """The library for a wheel or an editable install; or None, and why the package goes without.

    `wish` is the environment variable MGK_NATIVE: "require" makes a failure an error, "skip" compiles nothing.
    """
    if wish not in ("", "require", "skip"):
        raise ValueError(f"MGK_NATIVE: expected require or skip, got {wish!r}")
    if wish == "skip":
        return None, "MGK_NATIVE is skip"
    try:
        return build(), ""
    except BuildError as error:
        if wish == "require":
            raise
        return None, str(error)


def wheel_tag() -> str:
    """ctypes loads the library: it fits every version of Python, but one platform."""
    return "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    print(build(sys.argv[2:], Path(sys.argv[1])) if len(sys.argv) > 1 else build())
