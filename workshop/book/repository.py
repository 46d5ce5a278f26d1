"""The repository's public address, for installing notebooks and for links of the site."""

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
    """Return `[project.urls] Repository` of pyproject.toml, without a trailing `/` or `.git`; "" if
    it is not set."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return _trimmed(project.get("urls", {}).get("Repository", ""))


def site_repository(root: Path = ROOT) -> str:
    """Return the environment's `BOOK_REPOSITORY`, trimmed alike and even if it is "", else
    `repository_address`. Committed files, such as notebooks, must not depend on it."""
    return _trimmed(os.environ.get("BOOK_REPOSITORY", repository_address(root)))


def _trimmed(address: str) -> str:
    return address.rstrip("/").removesuffix(".git")
