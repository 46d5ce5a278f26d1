"""The repository's public address: one setting, for links of the site and installing notebooks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def repository_address(root: Path = ROOT) -> str:
    """Return the environment's `BOOK_REPOSITORY`, even if it is "", else `[project.urls]
    Repository` of pyproject.toml, without a trailing `/` or `.git`; "" if neither is set."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    configured: str = project.get("urls", {}).get("Repository", "")
    return os.environ.get("BOOK_REPOSITORY", configured).rstrip("/").removesuffix(".git")
