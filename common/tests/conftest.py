"""The model and the prompts of most tests of the whole engine: beginnings that are shared."""

from __future__ import annotations

import pytest
import torch

from common.loader import LoadedModel, load_model
from common.tests.engine_oracle import Oracle, with_noise


@pytest.fixture
def oracle(family_oracle: Oracle) -> Oracle:
    return family_oracle


@pytest.fixture
def loaded(family_loaded: LoadedModel) -> LoadedModel:
    return family_loaded


@pytest.fixture(scope="module")
def draft(family_oracle: Oracle) -> LoadedModel:
    """`loaded`, right about two times in three."""
    return with_noise(load_model(family_oracle.path, torch.float64, torch.device("cpu")))
