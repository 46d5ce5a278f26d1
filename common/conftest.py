from __future__ import annotations

from common.tests.kernel_device import device  # first: it decides how Triton is imported

# isort: split
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.engine_config import SHIPPED_CHECKPOINT
from common.models.loader import LoadedModel, load_model
from common.requests.tokenizer import load_tokenizer
from common.tests.engine_oracle import (
    Oracle,
    family_prompts,
    make_oracle,
    random_prompts,
    save_random_model,
    with_noise,
)
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
def random_oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    path = tmp_path_factory.mktemp("random-model")
    save_random_model(path)
    oracle = make_oracle(path, random_prompts(24, vocab_size=97, longest=40, seed=0))
    assert len({t for tokens in oracle.continuations for t in tokens}) > 50, "output is too uniform"
    return oracle


@pytest.fixture(scope="session")
def random_loaded(random_oracle: Oracle):
    return load_model(random_oracle.path, torch.float64, torch.device("cpu"))


@pytest.fixture(scope="session")
def family_oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Prompts that share beginnings of many lengths (chapter 3)."""
    path = tmp_path_factory.mktemp("family-model")
    save_random_model(path, seed=1)
    return make_oracle(path, family_prompts(seed=2))


@pytest.fixture(scope="session")
def family_loaded(family_oracle: Oracle):
    return load_model(family_oracle.path, torch.float64, torch.device("cpu"))


@pytest.fixture
def oracle(family_oracle: Oracle) -> Oracle:
    """Oracle of most tests of the whole engine; its beginnings are shared."""
    return family_oracle


@pytest.fixture
def loaded(family_loaded: LoadedModel) -> LoadedModel:
    return family_loaded


@pytest.fixture(scope="module")
def draft(family_oracle: Oracle) -> LoadedModel:
    """`loaded`, right about two times in three."""
    return with_noise(load_model(family_oracle.path, torch.float64, torch.device("cpu")))


@pytest.fixture(scope="session")
def shipped_tokenizer():
    return load_tokenizer(SHIPPED_CHECKPOINT)


@pytest.fixture(scope="session")
def shipped_loaded():
    return load_model(SHIPPED_CHECKPOINT, torch.float64, torch.device("cpu"))


@pytest.fixture(scope="session")
def shipped_oracle(shipped_tokenizer) -> Oracle:
    texts = [
        "def fibonacci(n):",
        "class Stack:",
        "import os\n",
        "#",
        "def read(path, mode='r'):\n    with open(path, mode) as f:\n        return",
        "for i in range(10):\n    print(",
        'def f(x):\n    """Return the square of x."""\n',
        "try:\n    import threading\nexcept ImportError:\n",
    ]
    return make_oracle(SHIPPED_CHECKPOINT, [shipped_tokenizer.encode(text) for text in texts])


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
