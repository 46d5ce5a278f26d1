"""The site in a real browser, by the fixtures of the watch page's tests."""

import pytest

from workshop.watch.conftest import browser_for_tests, open_page, tab

browser = pytest.fixture(scope="package")(browser_for_tests)

__all__ = ["browser", "open_page", "tab"]
