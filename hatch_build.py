"""The build hook of the package: compiles the native kernels into a wheel, or in place for `pip install -e .`

Without a C++ compiler the package is built without them, and works. MGK_NATIVE=require makes that an error, as for the
wheels that are published; MGK_NATIVE=skip builds a wheel of Python code alone.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def load_build(root: str) -> ModuleType:
    """`mgk.ops.native.build` without the package, which needs PyTorch."""
    path = Path(root) / "src" / "mgk" / "ops" / "native" / "build.py"
    spec = importlib.util.spec_from_file_location("mgk_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wish = os.environ.get("MGK_NATIVE", "")
        if wish not in ("", "require", "skip"):
            raise ValueError(f"MGK_NATIVE: expected require or skip, got {wish!r}")
        if self.target_name != "wheel" or wish == "skip":
            return
        build = load_build(self.root)
        try:
            path = build.build()
        except build.BuildError as error:
            if wish == "require":
                raise
            self.app.display_warning(f"mgk is built without its native CPU kernels: {error}")
            return
        build_data["artifacts"].append(str(path.relative_to(self.root)))  # git ignores it
        build_data["pure_python"] = False
        # ctypes loads the library: it fits every version of Python, but one platform.
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
