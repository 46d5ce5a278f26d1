"""The repository's public address, for links of the site."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def site_repository(root: Path = ROOT) -> str:
    """Return the environment's `BOOK_REPOSITORY`, even if it is "", else `[project.urls]
    Repository` of pyproject.toml, else "". Without a trailing `/` or `.git`."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address: str = project.get("urls", {}).get("Repository", "")
    address = os.environ.get("BOOK_REPOSITORY", address)
    return address.rstrip("/").removesuffix(".git")
