"""Load one module from another file, in one process: nothing in the checkout changes.

    ModuleSwap("radix_cache", Path("my/radix_cache.py")).install()

A folder in front of `sys.path` is not enough: pytest puts its own folders in front of that. So an
import hook handles this one name, before Python searches, and no other. Every import of the module,
in a chapter, `common` or a test, gets the other file. This works for a chapter's flat module
(`radix_cache`) and for one in a package (`common.engine`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True, slots=True)
class ModuleSwap(MetaPathFinder):
    """An import hook that finds `module`, named as in `import`, in `file`."""

    module: str
    file: Path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        return spec_from_file_location(fullname, self.file)

    def install(self) -> None:
        """Install the hook, once per process. Raises `RuntimeError` if the module is already
        imported, and `ValueError` if the file does not exist."""
        if not self.file.is_file():
            raise ValueError(f"file must be a file, got {self.file}")
        if self in sys.meta_path:
            return
        if self.module in sys.modules:
            raise RuntimeError(f"cannot swap {self.module}: already imported")
        sys.meta_path.insert(0, self)

    def check(self) -> None:
        """Import the module. Raises `RuntimeError` unless it comes from the other file."""
        found = import_module(self.module).__file__
        if found != str(self.file):
            raise RuntimeError(f"{self.module} must come from {self.file}, got {found}")


def name_of(path: Path) -> str:
    """Return a file's import name: `radix_cache` in a chapter, `common.engine` in a package."""
    path, folders = path.with_suffix(""), [path.parent]
    while (folders[-1] / "__init__.py").is_file():
        folders.append(folders[-1].parent)
    return ".".join(path.relative_to(folders[-1]).parts)
