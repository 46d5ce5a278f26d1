from __future__ import annotations

from common.tests.conftest import loaded, oracle

__all__ = ["loaded", "oracle"]
