"""Lays the chapters' modules flat in a wheel: `NN_chapter/beyond/kv_tiers.py` is `kv_tiers.py`.

Hatchling's `sources` maps a listed folder before the folders in it, so it cannot flatten a room.
Files that the engine does not need (tests, demos, everything in a `testing/`) are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FlatModules(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for pattern in ("*.py", "beyond/*.py", "beyond/*.cpp", "beyond/*.h"):
            for path in Path(self.root).glob(f"[0-9][0-9]_*/{pattern}"):
                if not path.name.startswith(("test_", "conftest")) and "_demo" not in path.name:
                    build_data["force_include"][str(path)] = path.name
