"""The model and the prompts of most tests of the whole engine: beginnings that are shared."""

from __future__ import annotations

import pytest

from common.loader import LoadedModel
from common.tests.engine_oracle import Oracle


@pytest.fixture
def oracle(family_oracle: Oracle) -> Oracle:
    return family_oracle


@pytest.fixture
def loaded(family_loaded: LoadedModel) -> LoadedModel:
    return family_loaded
