"""For every test of the repository: wrong code is reported soon.

Hypothesis does not shrink what it finds, because a broken chapter would take minutes to say so. A
failure prints how to repeat it. To see the smallest example of it:

    pytest 03_prefix_cache -k NAME --hypothesis-profile=shrink

Settings of single tests (`@settings(max_examples=...)`) keep the phases of the profile, which is
chosen here, before any test module is imported.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings

SLOW_TIMEOUT_S = 3600  # of a test marked slow; the others': `timeout` in pyproject.toml

settings.register_profile("shrink", print_blob=True)
settings.register_profile(
    "quick", print_blob=True, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
settings.load_profile("quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
