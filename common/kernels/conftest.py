from __future__ import annotations

from typing import Any

import pytest

from kernel_launch import Launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernel of each launch from now on."""
    found: list[str] = []
    real = Launch.__call__

    def spy(launch: Launch, grid: tuple[int, ...], *arguments: Any) -> None:
        found.append(launch.kernel.__name__)
        real(launch, grid, *arguments)

    monkeypatch.setattr(Launch, "__call__", spy)
    return found
