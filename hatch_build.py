"""Hatch's build hook: puts the C++ kernels into a wheel or an editable install where there is a compiler.

Without one the package is whole all the same: its kernels are then torch's.
"""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    """Builds `_native.so` and tags the wheel for this platform if it is in it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before files are collected; `version` is "standard" or "editable"."""
        kernels = _load(Path(self.root) / "scripts" / "build_kernels.py")
        try:
            kernels.build()
        except kernels.BuildError as exc:
            self.app.display_warning(str(exc))
            return
        build_data["pure_python"] = False
        # The library is reached through ctypes: it needs this platform, but no certain Python.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(str(kernels.LIBRARY.relative_to(self.root)))


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
