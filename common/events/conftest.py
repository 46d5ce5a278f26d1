from __future__ import annotations

import pytest
import torch

from common.loader import LoadedModel, load_model
from common.tests.engine_oracle import Oracle, with_noise


@pytest.fixture(scope="module")
def draft(family_oracle: Oracle) -> LoadedModel:
    """The model, right about two times in three."""
    return with_noise(load_model(family_oracle.path, torch.float64, torch.device("cpu")))
