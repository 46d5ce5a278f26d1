"""The address comes from the environment, else from pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from workshop.book.repository import repository_address

URLS = '[project]\nname = "a"\n[project.urls]\nRepository = "https://host/of/pyproject.git"\n'


@pytest.mark.parametrize(
    ("environment", "pyproject", "address"),
    [
        (None, '[project]\nname = "a"\n', ""),
        (None, URLS, "https://host/of/pyproject"),
        ("", URLS, ""),
        ("https://host/of/environment/", URLS, "https://host/of/environment"),
        ("https://host/a.git/", URLS, "https://host/a"),
    ],
)
def test_environment_is_asked_first(
    environment: str | None,
    pyproject: str,
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BOOK_REPOSITORY", raising=False)
    if environment is not None:
        monkeypatch.setenv("BOOK_REPOSITORY", environment)
    (tmp_path / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    assert repository_address(tmp_path) == address
