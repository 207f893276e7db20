"""The build hook of the package: compiles the native kernels into a wheel, or in place for `pip install -e .`

Without a C++ compiler the package is built without them, and works. MGK_NATIVE=require makes that an error, as for the
wheels that are published; MGK_NATIVE=skip builds a wheel of Python code alone.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # By its path: importing the package needs PyTorch.
        source = Path(self.root) / "src" / "mgk" / "ops" / "native" / "build.py"
        spec: Any = importlib.util.spec_from_file_location("mgk_native_build", source)
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        path, reason = build.for_package(os.environ.get("MGK_NATIVE", ""))
        if path is None:
            self.app.display_warning(f"mgk is built without its native CPU kernels: {reason}")
            return
        build_data["artifacts"].append(str(path.relative_to(self.root)))  # git ignores it
        build_data["pure_python"] = False
        build_data["tag"] = build.wheel_tag()
