"""The address comes from pyproject.toml; the site's from the environment, if it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from workshop.book.repository import repository_address, site_repository

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
def test_the_environment_is_asked_first_and_for_the_site_only(
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
    assert site_repository(tmp_path) == address
    committed = "https://host/of/pyproject" if pyproject == URLS else ""
    assert repository_address(tmp_path) == committed
