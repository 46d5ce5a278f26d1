from __future__ import annotations

from common.tests.kernel_device import device  # first: it decides how Triton is imported

# isort: split
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.engine_config import SHIPPED_CHECKPOINT
from common.models.loader import LoadedModel, load_model
from common.requests.tokenizer import Tokenizer, load_tokenizer
from common.tests.engine_oracle import Oracle
from common.tests.small_models import subject
from kernel_launch import Launch

__all__ = ["device"]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only get slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def random_oracle() -> Oracle:
    return subject("unrelated").oracle


@pytest.fixture(scope="session")
def random_loaded() -> LoadedModel:
    return subject("unrelated").loaded


@pytest.fixture(scope="session")
def family_oracle() -> Oracle:
    """Prompts that share beginnings of many lengths (chapter 3)."""
    return subject("family").oracle


@pytest.fixture(scope="session")
def family_loaded() -> LoadedModel:
    return subject("family").loaded


@pytest.fixture
def oracle(family_oracle: Oracle) -> Oracle:
    """Oracle of most tests of the whole engine; its beginnings are shared."""
    return family_oracle


@pytest.fixture
def loaded(family_loaded: LoadedModel) -> LoadedModel:
    return family_loaded


@pytest.fixture(scope="session")
def draft() -> LoadedModel:
    """`loaded`, right about two times in three."""
    return subject("family").draft


@pytest.fixture(scope="session")
def shipped_tokenizer() -> Tokenizer:
    return load_tokenizer(SHIPPED_CHECKPOINT)


@pytest.fixture(scope="session")
def shipped_loaded() -> LoadedModel:
    return load_model(SHIPPED_CHECKPOINT, torch.float64, torch.device("cpu"))


@pytest.fixture(scope="session")
def shipped_oracle() -> Oracle:
    return subject("shipped texts").oracle


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
