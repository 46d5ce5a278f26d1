"""The address comes from pyproject.toml; the site's from the environment, if it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from workshop.book.repository import site_repository

URLS = '[project]\nname = "a"\n[project.urls]\nRepository = "https://host/of/pyproject.git"\n'


def test_the_environment_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text(URLS, encoding="utf-8")
    for environment, address in (
        (None, "https://host/of/pyproject"),
        ("", ""),
        ("https://host/a.git/", "https://host/a"),
    ):
        monkeypatch.delenv("BOOK_REPOSITORY", raising=False)
        if environment is not None:
            monkeypatch.setenv("BOOK_REPOSITORY", environment)
        assert site_repository(tmp_path) == address
